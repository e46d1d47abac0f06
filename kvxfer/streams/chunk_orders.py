"""Orders of all segments of a chunk, worked out together: what a segment then costs is a copy of a few rows.

The segments that lie within one block of rows, which are nearly all, are cut into spans here, in arrays over the whole
chunk. What is left over (a segment over several blocks, one with more layers than an order has spans, or with more rows
than a lane has offsets) is cut by `spans.segment_orders` when it is asked for. Pure numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvxfer.addresses import BlockAddresses
from kvxfer.ownership import Int64Array
from kvxfer.segments import Block, BlockCut, ChunkPlan
from kvxfer.streams.ring import LINEAR, MAX_SPANS, SPAN_WORDS
from kvxfer.streams.spans import MAX_WORD_BYTES, Order, PoolSide, SlotSide, segment_orders

_MIN_SEGMENTS = 3  # of a block: with fewer it is faster to cut them one by one
_NO_OFFSETS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """All pieces of a block, `[num_pieces]` int64 each, in wire order; `segment` counts from the block's first."""

    segment: Int64Array
    layer_idx: Int64Array
    first_row: Int64Array
    num_rows: Int64Array
    slot_offset_bytes: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """One pool's offsets for each segment: rows `[first_row, end_row)` of `row_offsets`, none where these are equal;
    or, for a segment in `apart`, the rows of its pieces one after the other."""

    row_offsets: Int64Array
    first_row: list[int]
    end_row: list[int]
    apart: dict[int, list[slice]]

    def offsets(self, segment: int) -> Int64Array:
        pieces = self.apart.get(segment)
        if pieces is not None:
            return np.concatenate([self.row_offsets[rows] for rows in pieces])
        return self.row_offsets[self.first_row[segment] : self.end_row[segment]]


@dataclass(frozen=True, slots=True, eq=False)
class _BlockOrders:
    """The segments of a block: `words` `[num_pieces, SPAN_WORDS]` as they lie in a lane, but for where the slot
    begins; segment `i` has rows `[first_piece[i], first_piece[i + 1])` of it."""

    first_segment: int
    end_segment: int
    words: Int64Array
    first_piece: list[int]
    tables: tuple[_Table, ...]
    slot_columns: tuple[int, ...]
    max_offsets: int

    def order(self, segment: int, slot_first_byte: int) -> Order | None:
        """None for one that has to be cut otherwise."""
        if not self.first_segment <= segment < self.end_segment:
            return None
        idx = segment - self.first_segment
        words = self.words[self.first_piece[idx] : self.first_piece[idx + 1]]
        parts = [table.offsets(idx) for table in self.tables]
        offsets = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(words) > MAX_SPANS or offsets.size > self.max_offsets:
            return None
        words = words.copy()
        for column in self.slot_columns:
            words[:, column] += slot_first_byte
        return Order(words, offsets)


class ChunkOrders:
    """The orders that copy a chunk's segments from `src` to `dst`, for lanes of `max_offsets` offsets. A side that is a
    slot stands for the first one: where a segment's slot begins is said when its orders are asked for."""

    def __init__(self, plan: ChunkPlan, src: PoolSide | SlotSide, dst: PoolSide | SlotSide, max_offsets: int) -> None:
        self._plan = plan
        self._src = src
        self._dst = dst
        self._max_offsets = max_offsets
        found = [self._cut(block_idx) for block_idx in range(len(plan.blocks))]
        self._blocks = [each for each in found if each is not None]

    def segment(self, segment: int, slot_first_byte: int) -> list[Order]:
        """The orders that together copy a segment, as `spans.segment_orders`. Raises `LayoutError`."""
        for block in self._blocks:
            order = block.order(segment, slot_first_byte)
            if order is not None:
                return [order]
        src, dst = (
            replace(side, first_byte=slot_first_byte) if isinstance(side, SlotSide) else side
            for side in (self._src, self._dst)
        )
        return segment_orders(self._plan, segment, src, dst, self._max_offsets)

    def _cut(self, block_idx: int) -> _BlockOrders | None:
        """The segments that lie within the block alone; None where there are few of them, or where some row does not
        fit: which one, `segment_orders` says."""
        plan = self._plan
        block, cut = plan.blocks[block_idx], plan.cuts[block_idx]
        shares_first = block_idx > 0 and plan.cuts[block_idx - 1].end_segment > cut.first_segment
        shares_last = block_idx + 1 < len(plan.cuts) and plan.cuts[block_idx + 1].first_segment < cut.end_segment
        first_segment, end_segment = cut.first_segment + shares_first, cut.end_segment - shares_last
        if end_segment - first_segment < _MIN_SEGMENTS:
            return None
        pieces = _cut_block(block, cut, first_segment, end_segment)
        first_piece = np.searchsorted(pieces.segment, np.arange(end_segment - first_segment + 1))
        words = np.zeros((len(pieces.segment), SPAN_WORDS), dtype=np.int64)
        words[:, 0] = block.row_bytes
        words[:, 1] = pieces.num_rows
        bits = np.full(len(words), block.row_bytes | MAX_WORD_BYTES, dtype=np.int64)
        tables: list[_Table] = []
        slot_columns = []
        for side, column in ((self._src, 3), (self._dst, 6)):
            words[:, column] = side.memory
            if isinstance(side, SlotSide):
                if cut.segment_rows * block.row_bytes > side.num_bytes:
                    return None
                words[:, column + 1] = pieces.slot_offset_bytes
                words[:, column + 2] = LINEAR
                bits |= pieces.slot_offset_bytes | side.num_bytes  # any slot begins at a multiple of their size
                slot_columns.append(column + 1)
                continue
            table = _place_in_pool(words[:, column : column + 3], bits, side, block_idx, block, pieces, first_piece)
            if table is None:
                return None
            if tables:  # it follows the other one
                used = np.array([len(tables[0].offsets(idx)) for idx in range(end_segment - first_segment)])
                words[:, column + 2] += np.where(words[:, column + 2] == LINEAR, 0, used[pieces.segment])
            tables.append(table)
        words[:, 2] = bits & -bits
        return _BlockOrders(
            first_segment,
            end_segment,
            words,
            first_piece.tolist(),
            tuple(tables),
            tuple(slot_columns),
            self._max_offsets,
        )


def _cut_block(block: Block, cut: BlockCut, first_segment: int, end_segment: int) -> _Pieces:
    """The block's pieces in segments `[first_segment, end_segment)`: it is cut where a layer or a segment begins."""
    segment_firsts = np.arange(end_segment - cut.first_segment, dtype=np.int64) * cut.segment_rows
    segment_firsts[1:] += cut.head_rows - cut.segment_rows
    first_row, end_row = int(segment_firsts[first_segment - cut.first_segment]), block.num_wire_rows
    if end_segment < cut.end_segment:
        end_row = cut.head_rows + (end_segment - cut.first_segment - 1) * cut.segment_rows
    segment_firsts = segment_firsts[first_segment - cut.first_segment :]
    layer_firsts = np.arange(block.layers.num_layers, dtype=np.int64) * block.num_rows
    firsts = np.union1d(segment_firsts, layer_firsts[(layer_firsts > first_row) & (layer_firsts < end_row)])
    num_rows = np.diff(firsts, append=end_row)
    layer_idx = firsts // block.num_rows
    segment = np.searchsorted(segment_firsts, firsts, side="right") - 1
    slot_offset_bytes = (firsts - segment_firsts[segment]) * block.row_bytes
    if first_segment == cut.first_segment:
        slot_offset_bytes[segment == 0] += cut.slot_offset_bytes
    return _Pieces(segment, layer_idx, firsts - layer_idx * block.num_rows, num_rows, slot_offset_bytes)


def _place_in_pool(
    places: Int64Array,
    bits: Int64Array,
    side: PoolSide,
    block_idx: int,
    block: Block,
    pieces: _Pieces,
    first_piece: Int64Array,
) -> _Table | None:
    """Fill `places[:, 1:3]`: first byte and table of one side, and add to `bits` those that are set in any address.
    None where a row lies outside the pool."""
    addresses: BlockAddresses = side.addresses[block_idx]
    offsets = addresses.row_offsets
    layer_offsets = addresses.base_offset_bytes + pieces.layer_idx * addresses.layer_stride_bytes
    lowest = int(offsets.min()) + int(layer_offsets.min())
    highest = int(offsets.max()) + int(layer_offsets.max())
    if lowest < 0 or highest > side.num_bytes - block.row_bytes:
        return None
    num_gaps = np.concatenate(([0], np.cumsum(np.diff(offsets) != block.row_bytes)))  # before each row
    is_linear = num_gaps[pieces.first_row + pieces.num_rows - 1] == num_gaps[pieces.first_row]
    first_row = np.minimum.reduceat(pieces.first_row, first_piece[:-1])
    end_row = np.maximum.reduceat(pieces.first_row + pieces.num_rows, first_piece[:-1])
    # The end of one layer and the beginning of the next: a table of all between would be longer than two.
    is_apart = end_row - first_row > np.add.reduceat(pieces.num_rows, first_piece[:-1])
    end_row[np.logical_and.reduceat(is_linear, first_piece[:-1])] = 0
    end_row = np.maximum(first_row, end_row)
    rows_before = np.cumsum(pieces.num_rows) - pieces.num_rows
    in_table = np.where(
        is_apart[pieces.segment],
        rows_before - rows_before[first_piece[:-1]][pieces.segment],
        pieces.first_row - first_row[pieces.segment],
    )
    places[:, 1] = layer_offsets + np.where(is_linear, offsets[pieces.first_row], 0)
    places[:, 2] = np.where(is_linear, LINEAR, in_table)
    bits |= places[:, 1] | np.where(is_linear, 0, np.bitwise_or.reduce(offsets))
    apart = {
        idx: _rows_of(pieces, slice(first_piece[idx], first_piece[idx + 1]))
        for idx in np.flatnonzero(is_apart & (end_row > first_row)).tolist()
    }
    return _Table(offsets, first_row.tolist(), end_row.tolist(), apart)


def _rows_of(pieces: _Pieces, which: slice) -> list[slice]:
    firsts, nums = pieces.first_row[which].tolist(), pieces.num_rows[which].tolist()
    return [slice(first, first + num) for first, num in zip(firsts, nums, strict=True)]
