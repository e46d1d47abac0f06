"""Copies rows straight from one host pool into another: the pull of a decode agent that has its source's pool mapped.

Pages make rows lie at a constant distance on both sides for a while. Such a stripe, in all layers at once, is one
strided copy that passes over the bytes a single time: twice the rate of two index arrays and a temporary one. Where
stripes are short, as in pools of few layers with tiny pages, the call costs more than that, and indices are used.
"""

from __future__ import annotations

import numpy as np

from kvxfer.addresses import BlockAddresses
from kvxfer.errors import LayoutError
from kvxfer.ownership import Int64Array
from kvxfer.rows_host import ByteArray, row_windows
from kvxfer.segments import Block, ChunkPlan

# Rows copied by index pass through a temporary array of this size, small enough to stay in the second-level cache.
_STAGE_BYTES = 256 << 10
# A strided copy costs about 4 us beside its bytes: below this size two passes by index are as fast.
_MIN_STRIPE_BYTES = 16 << 10


def copy_part(
    src_pool: ByteArray,
    src_addresses: tuple[BlockAddresses, ...],
    dst_pool: ByteArray,
    dst_addresses: tuple[BlockAddresses, ...],
    plan: ChunkPlan,
    part_idx: int,
    num_parts: int,
) -> int:
    """Copy one of `num_parts` about equal parts of a chunk from `src_pool` into `dst_pool` (`[pool_bytes]` uint8 each,
    not the same memory): of every block a share of the rows, each in all its layers.

    Returns the bytes written. Raises `LayoutError`, before a byte moves, where a row lies outside its pool.
    """
    shares = []
    for block, src, dst in zip(plan.blocks, src_addresses, dst_addresses, strict=True):
        rows = slice(block.num_rows * part_idx // num_parts, block.num_rows * (part_idx + 1) // num_parts)
        if rows.start == rows.stop:
            continue
        for pool, side in ((src_pool, src), (dst_pool, dst)):
            _check_rows(pool, block, side, rows)
        shares.append((block, src, dst, rows))
    num_bytes = 0
    for block, src, dst, rows in shares:
        num_rows = rows.stop - rows.start
        num_bytes += num_rows * block.layers.num_layers * block.row_bytes
        stripes = find_stripes(src.row_offsets[rows], dst.row_offsets[rows])
        if num_rows * block.layers.num_layers * block.row_bytes >= len(stripes) * _MIN_STRIPE_BYTES:
            for first, end in stripes:
                stripe = slice(rows.start + first, rows.start + end)
                _stripe(dst_pool, block, dst, stripe)[...] = _stripe(src_pool, block, src, stripe)
        else:
            _copy_by_index(src_pool, src, dst_pool, dst, block, rows)
    return num_bytes


def find_stripes(src_offsets: Int64Array, dst_offsets: Int64Array) -> list[tuple[int, int]]:
    """Ranges `[first, end)` of rows, one behind the other and none empty, whose distance is constant on both sides.

    `src_offsets` and `dst_offsets` are `[num_rows]` int64, at least one row.
    """
    src_gaps, dst_gaps = np.diff(src_offsets), np.diff(dst_offsets)
    # Gap `i` lies between rows `i` and `i + 1`; a stripe ends at the row before the first gap that differs.
    changes = np.flatnonzero((src_gaps[1:] != src_gaps[:-1]) | (dst_gaps[1:] != dst_gaps[:-1])) + 1
    stripes = []
    first = 0
    for last in changes.tolist():
        if last > first:  # otherwise it is the gap between two stripes that differs
            stripes.append((first, last + 1))
            first = last + 1
    if first < src_offsets.size:
        stripes.append((first, src_offsets.size))
    return stripes


def _check_rows(pool: ByteArray, block: Block, addresses: BlockAddresses, rows: slice) -> None:
    offsets = addresses.row_offsets[rows]
    ends = (
        addresses.layer_offset_bytes(block, block.layers.first),
        addresses.layer_offset_bytes(block, block.layers.end - 1),
    )
    lowest, highest = int(offsets.min()) + min(ends), int(offsets.max()) + max(ends)
    last_offset_bytes = pool.size - block.row_bytes
    if lowest < 0 or highest > last_offset_bytes:
        raise LayoutError(
            f"row offsets: got {lowest} to {highest}, expected 0 to {last_offset_bytes}: rows of {block.row_bytes} "
            f"bytes in a pool of {pool.size} bytes"
        )


def _stripe(pool: ByteArray, block: Block, addresses: BlockAddresses, rows: slice) -> ByteArray:
    """`[num_layers, num_rows, row_bytes]` view of rows at a constant distance."""
    offsets = addresses.row_offsets
    gap_bytes = int(offsets[rows.start + 1] - offsets[rows.start]) if rows.stop - rows.start > 1 else block.row_bytes
    return np.ndarray(
        (block.layers.num_layers, rows.stop - rows.start, block.row_bytes),
        np.uint8,
        pool,
        addresses.layer_offset_bytes(block, block.layers.first) + int(offsets[rows.start]),
        (addresses.layer_stride_bytes, gap_bytes, 1),
    )


def _copy_by_index(
    src_pool: ByteArray,
    src: BlockAddresses,
    dst_pool: ByteArray,
    dst: BlockAddresses,
    block: Block,
    rows: slice,
) -> None:
    src_rows, dst_rows = row_windows(src_pool, block.row_bytes), row_windows(dst_pool, block.row_bytes)
    num_stage_rows = max(1, _STAGE_BYTES // block.row_bytes)
    for layer in range(block.layers.first, block.layers.end):
        src_base, dst_base = src.layer_offset_bytes(block, layer), dst.layer_offset_bytes(block, layer)
        for first in range(rows.start, rows.stop, num_stage_rows):
            stage = slice(first, min(first + num_stage_rows, rows.stop))
            dst_rows[dst.row_offsets[stage] + dst_base] = src_rows[src.row_offsets[stage] + src_base]
