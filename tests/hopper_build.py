"""Builds the Gluon form of `mla_decode` for a Hopper GPU on a machine without one: `python -m tests.hopper_build DIR`.

Writes DIR/ptx and DIR/shared_bytes. A program of its own, because Triton's bindings report at exit what they leak.
"""

import sys
from pathlib import Path

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from kvxfer.kernels import _mla_hopper

CONSTANTS = {
    "NUM_HEADS": 128,
    "PAGE_TOKENS": 64,
    "PAGE_ROWS": 64,
    "STAGES": 2,
    "BLOCK_H": _mla_hopper.BLOCK_H,
    "BLOCK_N": _mla_hopper.BLOCK_N,
    "V_DIM": _mla_hopper.V_DIM,
    "R_DIM": _mla_hopper.R_DIM,
}
LAYOUT = NVMMASharedLayout(128, 16, 2)
TYPES = {
    "kv_v": f"tensordesc<bf16[64, 512],{LAYOUT!r}>",
    "kv_r": f"tensordesc<bf16[64, 64],{LAYOUT!r}>",
    "q_ptr": "*bf16",
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "out_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "scale_log2": "fp32",
}


def build(directory: Path) -> None:
    names = _mla_hopper.split_kernel.arg_names
    signature = {name: "constexpr" if name in CONSTANTS else TYPES.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in CONSTANTS.items()}
    source = GluonASTSource(_mla_hopper.split_kernel, signature, constants)
    built = triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    (directory / "ptx").write_text(built.asm["ptx"])
    (directory / "shared_bytes").write_text(str(built.metadata.shared))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
