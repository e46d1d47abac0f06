"""Kernels of kvxfer: rows between strided tables, rows moved by orders, the DCP all-to-all, merged attention.

CUDA tensors run Triton, CPU tensors torch (`kvxfer.kernels.reference`); the contracts are the same.
"""

from kvxfer.kernels._contract import LseBase
from kvxfer.kernels.a2a import pack_a2a, unpack_combine
from kvxfer.kernels.a2a_layout import A2ALayout
from kvxfer.kernels.ag_rs import scale_partial_, scale_to_staging
from kvxfer.kernels.combine import lse_combine, mask_empty_
from kvxfer.kernels.mla_decode import mla_decode
from kvxfer.kernels.moves import move_rows
from kvxfer.kernels.rows import copy_rows, gather_rows

__all__ = [
    "A2ALayout",
    "LseBase",
    "copy_rows",
    "gather_rows",
    "lse_combine",
    "mask_empty_",
    "mla_decode",
    "move_rows",
    "pack_a2a",
    "scale_partial_",
    "scale_to_staging",
    "unpack_combine",
]
