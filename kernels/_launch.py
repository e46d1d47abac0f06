"""What every kernel wrapper here shares: the one guarded Triton import, where an op runs, and word widths.

CUDA tensors run the Triton kernels. CPU tensors run `kvxfer.kernels.reference`, unless Triton's interpreter is on
(`TRITON_INTERPRET=1` in the environment before the first import): then the Triton kernels themselves run on the CPU.
"""

import math
import os
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language

    HAS_TRITON = True
    jit: Any = triton.jit
    tl: Any = triton.language
except ImportError:  # a CPU install: the torch path serves every call, the kernel sources below are never traced
    HAS_TRITON = False
    tl = SimpleNamespace(constexpr=int)  # an annotation, and what makes constants

    def jit(fn: object = None, **_options: object) -> object:
        return fn if fn is not None else jit


INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
# CUDA's limit on the first grid dimension; every kernel here is one-dimensional or strides over its work.
MAX_GRID = 2**31 - 1
MAX_WORD_BYTES = 16


def runs_triton(tensor: torch.Tensor) -> bool:
    """True where an op on `tensor` is to launch its Triton kernel rather than to run in torch."""
    return INTERPRETED or (HAS_TRITON and tensor.is_cuda)


def widest_word_bytes(*bytes_or_addresses: int) -> int:
    """The widest word (16, 8, 4, 2 or 1 bytes) that divides all the given sizes, strides and addresses."""
    return math.gcd(MAX_WORD_BYTES, *bytes_or_addresses)


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
