"""Page ids on the wire: little-endian uint32, four bytes each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ContractError, LayoutError


def encode_pages(pages: npt.ArrayLike, where: str) -> bytes:
    """`pages` `[num_pages]`, any integers, as wire bytes. Raises `ContractError` naming `where` for anything else."""
    array = np.asarray(pages)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ContractError(f"{where}: pages: got {array.ndim} dimensions of {array.dtype}, expected one of integers")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= 1 << 32:
        raise ContractError(f"{where}: pages: got ids from {lowest} to {highest}, expected 0 to {(1 << 32) - 1}")
    return array.astype("<u4").tobytes()


def decode_pages(data: bytes) -> npt.NDArray[np.int64]:
    """Inverse of `encode_pages`, `[num_pages]` int64. Raises `LayoutError` for a length that is no multiple of 4."""
    if len(data) % 4:
        raise LayoutError(f"pages: got {len(data)} bytes, expected a multiple of 4")
    return np.frombuffer(data, dtype="<u4").astype(np.int64)
