"""`move_rows`, row by row: see `kvxfer.kernels.moves` for what the words mean."""

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvxfer.row_sums import row_sum

_MAX_SPANS, _SPAN_WORDS, _SPANS_WORD = 64, 16, 8
_OFFSETS_WORD = _SPANS_WORD + _MAX_SPANS * _SPAN_WORDS
_MOVED, _CHECKED = 1, 2


def move_rows(
    words: torch.Tensor,
    memories: torch.Tensor,
    entry_word: int,
    run_value: int,
    lanes_word: int,
    lane_words: int,
) -> None:
    """As `kvxfer.kernels.move_rows`; the addresses are of this process's memory."""
    order, _, lane, num_used = words[entry_word : entry_word + 4].tolist()
    if order != run_value or not 0 <= lane < (len(words) - lanes_word) // lane_words or not 0 < num_used <= lane_words:
        return
    first = lanes_word + lane * lane_words
    kind, begin, num_bytes, expected, *of_segment = words[first + 2 : first + 8].tolist()
    total = 0
    if kind == _CHECKED:
        total = _stage(memories, of_segment, begin, num_bytes, expected)
    if kind != _CHECKED or total == expected:
        for src, dst, place, row_bytes in _rows(words[first : first + lane_words], memories):
            if kind == _MOVED:
                total += row_sum(_bytes(src, row_bytes), place - begin)
            ctypes.memmove(dst, src, row_bytes)
    if kind:
        words[entry_word + 4] = _signed(total)


def _stage(memories: torch.Tensor, of_segment: list[int], first_byte: int, num_bytes: int, expected: int) -> int:
    """Copy a segment that is to be checked; its sum, or a wrong one where it cannot be copied."""
    (src, src_bytes), (dst, dst_bytes) = (_memory(memories, index) for index in of_segment)
    if not 0 < num_bytes <= min(dst_bytes, src_bytes - first_byte) or first_byte < 0 or first_byte % 16:
        return ~expected
    ctypes.memmove(dst, src + first_byte, num_bytes)
    return _signed(row_sum(_bytes(dst, num_bytes)))


def _rows(lane: torch.Tensor, memories: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Addresses in source and destination of the rows that may be moved, the place in the latter, and row bytes."""
    offsets = lane[_OFFSETS_WORD:].tolist()
    for idx in range(min(int(lane[0]), _MAX_SPANS)):
        begin = _SPANS_WORD + idx * _SPAN_WORDS
        row_bytes, num_rows, word_bytes, *sides = lane[begin : begin + 9].tolist()
        if word_bytes not in (1, 2, 4, 8, 16) or row_bytes < 1 or row_bytes % word_bytes:
            continue
        for row in range(num_rows):
            src, dst = (_place(memories, offsets, side, row, row_bytes, word_bytes) for side in (sides[:3], sides[3:]))
            if src is not None and dst is not None:
                yield sum(src), sum(dst), dst[1], row_bytes


def _place(
    memories: torch.Tensor, offsets: list[int], side: list[int], row: int, row_bytes: int, word_bytes: int
) -> tuple[int, int] | None:
    """Where its memory begins and where a row does in it, or None where it may not be touched."""
    memory, first_byte, table = side
    if table == -1:
        begin = first_byte + row * row_bytes
    elif 0 <= table + row < len(offsets):
        begin = first_byte + offsets[table + row]
    else:
        return None
    address, num_bytes = _memory(memories, memory)
    if begin < 0 or begin + row_bytes > num_bytes or begin % word_bytes:
        return None
    return address, begin


def _memory(memories: torch.Tensor, index: int) -> tuple[int, int]:
    """Address and bytes of a memory; 0 bytes where there is none."""
    address, num_bytes = memories[index].tolist() if 0 <= index < len(memories) else (0, 0)
    return address, num_bytes


def _bytes(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of this process's memory; borrows, frees nothing."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _signed(total: int) -> int:
    """A sum as the word of an entry holds it."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
