"""Triton kernels compiled ahead, for launches through CUDA's driver by a process that needs no Triton for them."""

from dataclasses import dataclass
from typing import Any

# Of a thread. Programs of 256 threads then leave half of a multiprocessor's registers to the worker's kernels; left to
# itself the compiler gives the rare paths of `move_rows` 176. None are spilled.
_MAX_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel for one kind of GPU, for launches through CUDA's driver.

    Its `num_params` parameters are of 8 bytes each; the last two are null pointers, Triton's own.
    """

    cubin: bytes
    name: str
    num_params: int
    num_threads: int
    shared_bytes: int


def compile_kernel(
    kernel: Any,  # noqa: ANN401 - Triton's functions have no types
    pointers: list[str],
    numbers: list[str],
    constants: dict[str, int],
    capability: int,
    num_warps: int,
) -> CompiledKernel:
    """Compile for GPUs of a compute capability; needs none. The parameters are `pointers` to int64, then int64
    `numbers`."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature = dict.fromkeys(pointers, "*i64") | dict.fromkeys(numbers, "i64")
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False, "maxnreg": _MAX_REGISTERS},
    )
    metadata = compiled.metadata
    assert metadata.global_scratch_size == metadata.profile_scratch_size == 0, "the kernel wants scratch memory"
    num_params = len(pointers) + len(numbers) + 2
    return CompiledKernel(compiled.asm["cubin"], metadata.name, num_params, metadata.num_warps * 32, metadata.shared)
