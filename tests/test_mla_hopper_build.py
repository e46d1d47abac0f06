"""The Gluon form of `mla_decode` builds for a Hopper GPU on a machine without one, and uses what it was written for."""

import re
from pathlib import Path

import pytest
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
POINTERS = {"q_ptr": "*bf16", "table_ptr": "*i32", "lens_ptr": "*i32", "out_ptr": "*fp32", "lse_ptr": "*fp32"}
MAX_SHARED_BYTES = 227 * 1024


def test_builds_with_warpgroup_products_bulk_copies_and_register_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is unset
    layout = NVMMASharedLayout(128, 16, 2)
    tiles = {"kv_v": f"tensordesc<bf16[64, 512],{layout!r}>", "kv_r": f"tensordesc<bf16[64, 64],{layout!r}>"}
    names = _mla_hopper.split_kernel.arg_names
    signature = {
        name: "constexpr"
        if name in CONSTANTS
        else "fp32"
        if name == "scale_log2"
        else {**POINTERS, **tiles}.get(name, "i32")
        for name in names
    }
    constants = {(names.index(name),): value for name, value in CONSTANTS.items()}
    source = GluonASTSource(_mla_hopper.split_kernel, signature, constants)
    built = triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = built.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in ptx
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    assert re.search(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+240", ptx)
    assert built.metadata.shared <= MAX_SHARED_BYTES
