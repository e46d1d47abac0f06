"""Orders of all segments of a chunk, worked out together: what a segment then costs is two slices.

The segments that lie within one block of rows, which are nearly all, are cut into spans here, in arrays over the whole
chunk. How they are cut follows from the block's shape, and chunks and legs of a transfer share that: it is worked out
once and kept. What is left over (a segment over several blocks, one with more layers than an order has spans, or with
more rows than a lane has offsets) is cut by `spans.segment_orders` when it is asked for. Pure numpy.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvxfer.addresses import BlockAddresses
from kvxfer.ownership import Int64Array
from kvxfer.segments import Block, BlockCut, ChunkPlan
from kvxfer.streams.ring import DST_COLUMN, LINEAR, MAX_SPANS, SPAN_WORDS, SRC_COLUMN
from kvxfer.streams.spans import MAX_WORD_BYTES, NO_OFFSETS, Order, PoolSide, SlotSide, segment_orders

_NUM_SHAPES: Final = 32
_Table = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """All pieces of a block, `[num_pieces]` int64 each, in wire order; `segment` counts from the block's first."""

    segment: Int64Array
    layer_idx: Int64Array
    first_row: Int64Array
    num_rows: Int64Array
    slot_offset_bytes: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What the orders of a block's segments have in common, wherever its rows lie in a pool.

    `words`: `[num_pieces, SPAN_WORDS]` as they lie in a lane, but for the first byte in the pool and the width of
    words. `bits`: what keeps these narrow beside the pool's addresses. Segment `i` has `pieces[i]` of the words one
    after the other, and begins with the piece `first_piece[i]`. Its table are the rows `tables[i]` of the block's
    offsets, `[first, end)` one after the other; tables that are equal are one object.
    """

    words: Int64Array
    bits: Int64Array
    layer_idx: Int64Array
    first_row: Int64Array
    last_row: Int64Array
    first_piece: Int64Array
    pieces: list[slice]
    tables: list[_Table]


@dataclass(slots=True, eq=False)
class _BlockOrders:
    """The segments of a block, as in its `_Shape`; one of those in `linear` needs no table. Segments that follow each
    other and have the same table get it as one object."""

    first_segment: int
    end_segment: int
    words: memoryview
    row_offsets: Int64Array
    shape: _Shape
    linear: frozenset[int]
    kept: tuple[_Table, Int64Array] | None = None  # the table that was asked for last, and its offsets

    def order(self, segment: int) -> Order:
        idx = segment - self.first_segment
        words, table = self.words[self.shape.pieces[idx]], self.shape.tables[idx]
        if idx in self.linear:
            return Order(words, NO_OFFSETS)
        if self.kept is None or self.kept[0] is not table:
            parts = [self.row_offsets[first:end] for first, end in table]
            self.kept = table, parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Order(words, self.kept[1])


class ChunkOrders:
    """The orders that copy a chunk's segments from a pool to slots or the other way round, for lanes of `max_offsets`
    offsets."""

    def __init__(self, plan: ChunkPlan, pool: PoolSide, slot: SlotSide, max_offsets: int, *, is_gather: bool) -> None:
        self._plan = plan
        self._pool = pool
        self._slot = slot
        self._max_offsets = max_offsets
        self._is_gather = is_gather
        found = [self._cut(block_idx) for block_idx in range(len(plan.blocks))]
        self._blocks = [each for each in found if each is not None]

    def segment(self, segment: int) -> list[Order]:
        """The orders that together copy a segment, as `spans.segment_orders`. Raises `LayoutError`."""
        for block in self._blocks:
            if block.first_segment <= segment < block.end_segment:
                order = block.order(segment)
                if len(order.span_words) <= MAX_SPANS * SPAN_WORDS and len(order.offsets) <= self._max_offsets:
                    return [order]
        src, dst = (self._pool, self._slot) if self._is_gather else (self._slot, self._pool)
        return segment_orders(self._plan, segment, src, dst, self._max_offsets)

    def _cut(self, block_idx: int) -> _BlockOrders | None:
        """The segments that lie within the block alone; None where there are none, or where some row does not fit:
        which one, `segment_orders` says."""
        plan, pool = self._plan, self._pool
        block, cut, addresses = plan.blocks[block_idx], plan.cuts[block_idx], pool.addresses[block_idx]
        shares_first = block_idx > 0 and plan.cuts[block_idx - 1].end_segment > cut.first_segment
        shares_last = block_idx + 1 < len(plan.cuts) and plan.cuts[block_idx + 1].first_segment < cut.end_segment
        first_segment, end_segment = cut.first_segment + shares_first, cut.end_segment - shares_last
        if first_segment >= end_segment or not _fits(block, addresses, pool.num_bytes):
            return None
        if cut.segment_rows * block.row_bytes > self._slot.num_bytes:
            return None
        rows = block.layers.num_layers, block.num_rows, block.row_bytes
        shape = _shape_of(rows, cut, first_segment, end_segment, pool.memory, self._slot, is_gather=self._is_gather)
        words, linear = _place(shape, addresses, SRC_COLUMN if self._is_gather else DST_COLUMN)
        return _BlockOrders(first_segment, end_segment, words.reshape(-1).data, addresses.row_offsets, shape, linear)


def _fits(block: Block, addresses: BlockAddresses, pool_bytes: int) -> bool:
    """Whether every row of the block lies in the pool."""
    offsets, base = addresses.row_offsets, addresses.base_offset_bytes
    last_layer = base + (block.layers.num_layers - 1) * addresses.layer_stride_bytes
    lowest, highest = int(offsets.min()) + min(base, last_layer), int(offsets.max()) + max(base, last_layer)
    return lowest >= 0 and highest <= pool_bytes - block.row_bytes


def _place(shape: _Shape, addresses: BlockAddresses, column: int) -> tuple[Int64Array, frozenset[int]]:
    """The words of a block of that shape whose rows lie there, `column` and the next two for the pool; and the segments
    whose pieces are all rows one behind the other."""
    offsets = addresses.row_offsets
    layer_offsets = addresses.base_offset_bytes + shape.layer_idx * addresses.layer_stride_bytes
    words = shape.words.copy()
    words[:, column + 1] = layer_offsets
    bits = shape.bits | layer_offsets | np.bitwise_or.reduce(offsets)
    num_gaps = np.zeros(len(offsets), dtype=np.int64)  # before each row
    np.cumsum(offsets[1:] - offsets[:-1] != addresses.row_bytes, out=num_gaps[1:])
    is_linear = num_gaps[shape.last_row] == num_gaps[shape.first_row]
    linear: frozenset[int] = frozenset()
    if is_linear.any():
        begins = layer_offsets[is_linear] + offsets[shape.first_row[is_linear]]
        words[is_linear, column + 1] = begins
        words[is_linear, column + 2] = LINEAR
        bits[is_linear] = shape.bits[is_linear] | begins
        linear = frozenset(np.flatnonzero(np.logical_and.reduceat(is_linear, shape.first_piece)).tolist())
    words[:, 2] = bits & -bits
    return words, linear


@functools.lru_cache(maxsize=_NUM_SHAPES)
def _shape_of(
    rows: tuple[int, int, int],
    cut: BlockCut,
    first_segment: int,
    end_segment: int,
    pool_memory: int,
    slot: SlotSide,
    *,
    is_gather: bool,
) -> _Shape:
    """Of a block of `rows`, its layers, the rows in one and the bytes of one; no array of it is ever written to."""
    row_bytes = rows[2]
    pieces = _cut_block(rows, cut, first_segment, end_segment)
    at = np.searchsorted(pieces.segment, np.arange(end_segment - first_segment))  # the first of each segment
    end_row = pieces.first_row + pieces.num_rows
    first_in_table = np.minimum.reduceat(pieces.first_row, at)
    end_in_table = np.maximum.reduceat(end_row, at)
    # The end of one layer and the beginning of the next: a table of all between would be longer than two.
    is_apart = end_in_table - first_in_table > np.add.reduceat(pieces.num_rows, at)
    rows_before = np.cumsum(pieces.num_rows) - pieces.num_rows
    in_table = np.where(
        is_apart[pieces.segment],
        rows_before - rows_before[at][pieces.segment],
        pieces.first_row - first_in_table[pieces.segment],
    )
    words = np.zeros((len(end_row), SPAN_WORDS), dtype=np.int64)
    words[:, 0], words[:, 1] = row_bytes, pieces.num_rows
    pool_column, slot_column = (SRC_COLUMN, DST_COLUMN) if is_gather else (DST_COLUMN, SRC_COLUMN)
    words[:, pool_column], words[:, pool_column + 2] = pool_memory, in_table
    words[:, slot_column], words[:, slot_column + 2] = slot.memory, LINEAR
    words[:, slot_column + 1] = pieces.slot_offset_bytes
    bits = pieces.slot_offset_bytes | (row_bytes | slot.num_bytes | MAX_WORD_BYTES)
    ends = np.append(at, len(words))
    tables = [
        _ranges(pieces.first_row[first:end], end_row[first:end])
        if is_apart[idx]
        else ((int(first_in_table[idx]), int(end_in_table[idx])),)
        for idx, (first, end) in enumerate(itertools.pairwise(ends.tolist()))
    ]
    kept = {table: table for table in tables}
    tables = [kept[table] for table in tables]
    of_segments = [slice(*words_of) for words_of in itertools.pairwise((ends * SPAN_WORDS).tolist())]
    return _Shape(words, bits, pieces.layer_idx, pieces.first_row, end_row - 1, at, of_segments, tables)


def _ranges(firsts: Int64Array, ends: Int64Array) -> _Table:
    return tuple(zip(firsts.tolist(), ends.tolist(), strict=True))


def _cut_block(rows: tuple[int, int, int], cut: BlockCut, first_segment: int, end_segment: int) -> _Pieces:
    """The block's pieces in segments `[first_segment, end_segment)`: it is cut where a layer or a segment begins."""
    num_layers, num_rows_in_layer, row_bytes = rows
    segment_firsts = np.arange(end_segment - cut.first_segment, dtype=np.int64) * cut.segment_rows
    segment_firsts[1:] += cut.head_rows - cut.segment_rows
    first_row, end_row = int(segment_firsts[first_segment - cut.first_segment]), num_layers * num_rows_in_layer
    if end_segment < cut.end_segment:
        end_row = cut.head_rows + (end_segment - cut.first_segment - 1) * cut.segment_rows
    segment_firsts = segment_firsts[first_segment - cut.first_segment :]
    layer_firsts = np.arange(num_layers, dtype=np.int64) * num_rows_in_layer
    layer_firsts = layer_firsts[(layer_firsts > first_row) & (layer_firsts < end_row)]
    firsts = np.sort(np.concatenate((segment_firsts, layer_firsts)))
    firsts = firsts[np.concatenate(([True], firsts[1:] != firsts[:-1]))]
    num_rows = np.concatenate((firsts[1:], [end_row])) - firsts
    layer_idx = firsts // num_rows_in_layer
    segment = np.searchsorted(segment_firsts, firsts, side="right") - 1
    slot_offset_bytes = (firsts - segment_firsts[segment]) * row_bytes
    return _Pieces(segment, layer_idx, firsts - layer_idx * num_rows_in_layer, num_rows, slot_offset_bytes)
