"""`move_rows`, row by row: see `kvxfer.kernels.moves` for what the words mean."""

import ctypes

import torch

_MAX_SPANS, _SPAN_WORDS, _SPANS_WORD = 64, 16, 8
_OFFSETS_WORD = _SPANS_WORD + _MAX_SPANS * _SPAN_WORDS


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
    offsets = words[first + _OFFSETS_WORD : first + lane_words].tolist()
    for idx in range(min(int(words[first]), _MAX_SPANS)):
        begin = first + _SPANS_WORD + idx * _SPAN_WORDS
        row_bytes, num_rows, word_bytes, *sides = words[begin : begin + 9].tolist()
        if word_bytes not in (1, 2, 4, 8, 16) or row_bytes < 1 or row_bytes % word_bytes:
            continue
        for row in range(num_rows):
            src, dst = (
                _address(memories, offsets, side, row, row_bytes, word_bytes) for side in (sides[:3], sides[3:])
            )
            if src is not None and dst is not None:
                ctypes.memmove(dst, src, row_bytes)


def _address(
    memories: torch.Tensor, offsets: list[int], side: list[int], row: int, row_bytes: int, word_bytes: int
) -> int | None:
    """Where a row begins, or None where it may not be touched."""
    memory, first_byte, table = side
    if table == -1:
        begin = first_byte + row * row_bytes
    elif 0 <= table + row < len(offsets):
        begin = first_byte + offsets[table + row]
    else:
        return None
    if not 0 <= memory < len(memories):
        return None
    address, num_bytes = memories[memory].tolist()
    if begin < 0 or begin + row_bytes > num_bytes or begin % word_bytes:
        return None
    return int(address) + begin
