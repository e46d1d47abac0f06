"""From a segment of a chunk to what a lane of a ring holds: spans of rows and the tables of their offsets.

Layers of a block lie at a constant distance, so their spans share one table: it has as many offsets as a layer has
rows, not as the segment has. A segment with more pieces than a lane has spans folds the pieces of each block into one
span; one that still does not fit is cut into several orders. Pure numpy.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvxfer.addresses import BlockAddresses
from kvxfer.errors import LayoutError
from kvxfer.ownership import Int64Array
from kvxfer.segments import Block, ChunkPlan, Piece
from kvxfer.streams.ring import DST_COLUMN, LINEAR, MAX_SPANS, SPAN_WORDS, SRC_COLUMN

MAX_WORD_BYTES = 16
NO_OFFSETS: Final = np.empty(0, dtype=np.int64)
AS_THEY_ARE: Final = (0, 0)
"""In place of a column of spans and what is added there."""
_LAYER, _FIRST_ROW, _END_ROW, _SLOT_OFFSET = range(1, 5)  # columns of pieces as an array, `[num_pieces, 5]`


@dataclass(frozen=True, slots=True, eq=False)
class PoolSide:
    """Rows lie in a pool of `num_bytes`, the memory `memory` of the stream's owner, where `addresses` say."""

    memory: int
    num_bytes: int
    addresses: tuple[BlockAddresses, ...]


@dataclass(frozen=True, slots=True)
class SlotSide:
    """Rows lie one behind the other in a slot of `num_bytes` of the memory `memory`, which begins at a multiple of
    these. Orders say the first one; which it is, whoever writes them into a lane adds."""

    memory: int
    num_bytes: int


class Order(NamedTuple):
    """What one entry moves: at most `MAX_SPANS` spans as they lie in a lane, `[num_spans * SPAN_WORDS]` int64, and the
    tables that they name, `[num_offsets]` int64. Never written to: others share both, and a lane is known to hold the
    table that it got last."""

    span_words: memoryview
    offsets: Int64Array


class _Tables:
    """The row offsets of one order."""

    def __init__(self) -> None:
        self._parts: list[Int64Array] = []
        self.num_offsets = 0

    def add(self, offsets: Int64Array) -> int:
        """Where the offsets begin."""
        first = self.num_offsets
        self._parts.append(offsets)
        self.num_offsets += offsets.size
        return first

    def offsets(self) -> Int64Array:
        return np.concatenate(self._parts) if self._parts else NO_OFFSETS


def segment_orders(
    plan: ChunkPlan, segment: int, src: PoolSide | SlotSide, dst: PoolSide | SlotSide, max_offsets: int
) -> list[Order]:
    """The orders that together copy a segment from `src` to `dst`, for lanes of `max_offsets` offsets. One, but for
    segments of very many rows or blocks.

    Raises `LayoutError` where a row lies outside its pool or the segment is larger than its slot.
    """
    return _orders(plan, plan.pieces(segment), src, dst, max_offsets, MAX_SPANS)


def pull_orders(plan: ChunkPlan, src: PoolSide, dst: PoolSide, max_offsets: int) -> list[Order]:
    """The orders that together copy a whole chunk from pool to pool, for lanes of `max_offsets` offsets: as few as
    their spans and tables allow, since on a GPU many rows cost little more than a few.

    Raises `LayoutError` where a row lies outside its pool.
    """
    bundles: list[tuple[list[Int64Array], _Tables]] = []
    num_spans = 0  # of the last bundle
    for block_idx, block in enumerate(plan.blocks):
        num_parts = -(-block.num_rows // max(1, max_offsets // 2))
        for part_idx in range(num_parts):
            rows = slice(block.num_rows * part_idx // num_parts, block.num_rows * (part_idx + 1) // num_parts)
            for first_layer in range(0, block.layers.num_layers, MAX_SPANS):
                layers = range(first_layer, min(first_layer + MAX_SPANS, block.layers.num_layers))
                num_offsets = 2 * (rows.stop - rows.start)
                if (
                    not bundles
                    or num_spans + len(layers) > MAX_SPANS
                    or bundles[-1][1].num_offsets + num_offsets > max_offsets
                ):
                    bundles.append(([], _Tables()))
                    num_spans = 0
                num_spans += len(layers)
                bundles[-1][0].append(_pull_words(block_idx, block, layers, rows, (src, dst), bundles[-1][1]))
    return [Order(np.concatenate(words).reshape(-1).data, tables.offsets()) for words, tables in bundles]


def _pull_words(
    block_idx: int, block: Block, layers: range, rows: slice, sides: tuple[PoolSide, PoolSide], tables: _Tables
) -> Int64Array:
    """`[num_layers, SPAN_WORDS]`: one span a layer of the block, all with the same rows. `layers` count from its first
    one."""
    words = np.zeros((len(layers), SPAN_WORDS), dtype=np.int64)
    words[:, 0] = block.row_bytes
    words[:, 1] = rows.stop - rows.start
    layer_idxs = np.arange(layers.start, layers.stop, dtype=np.int64)
    bits: Int64Array | int = block.row_bytes | MAX_WORD_BYTES
    for side, column in zip(sides, (SRC_COLUMN, DST_COLUMN), strict=True):
        addresses = side.addresses[block_idx]
        offsets = addresses.row_offsets[rows]
        first_bytes = layer_idxs * addresses.layer_stride_bytes
        first_bytes += addresses.base_offset_bytes
        ends = int(first_bytes[0]), int(first_bytes[-1])
        _check_rows(side, block, int(offsets.min()) + min(ends), int(offsets.max()) + max(ends))
        if _touch(offsets, block.row_bytes):
            first_bytes += offsets[0]
            table = LINEAR
        else:
            table = tables.add(offsets)
            bits = bits | int(np.bitwise_or.reduce(offsets))
        words[:, column], words[:, column + 1], words[:, column + 2] = side.memory, first_bytes, table
        bits = bits | first_bytes
    words[:, 2] = bits & -bits
    return words


def _orders(
    plan: ChunkPlan,
    pieces: Sequence[Piece],
    src: PoolSide | SlotSide,
    dst: PoolSide | SlotSide,
    max_offsets: int,
    max_spans: int,
) -> list[Order]:
    tables = _Tables()
    must_fold = len(pieces) > MAX_SPANS
    parts = [_block_words(plan, of_block, src, dst, tables, must_fold=must_fold) for of_block in _by_block(pieces)]
    words = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if len(words) <= max_spans and tables.num_offsets <= max_offsets:
        return [Order(words.reshape(-1).data, tables.offsets())]
    # Of several orders each leaves room for a span that keeps what those before it have put into the slot.
    return [
        order for half in _halves(plan, pieces) for order in _orders(plan, half, src, dst, max_offsets, MAX_SPANS - 1)
    ]


def _by_block(pieces: Sequence[Piece]) -> list[list[Piece]]:
    if pieces[0].block_idx == pieces[-1].block_idx:  # blocks come in order
        return [list(pieces)]
    return [list(of_block) for _, of_block in itertools.groupby(pieces, key=operator.attrgetter("block_idx"))]


def _halves(plan: ChunkPlan, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Cut in two, neither empty: a single row needs no table and always fits."""
    if len(pieces) > 1:
        return list(pieces[: len(pieces) // 2]), list(pieces[len(pieces) // 2 :])
    (piece,) = pieces
    middle = (piece.first_row + piece.end_row) // 2
    slot_offset_bytes = piece.slot_offset_bytes + (middle - piece.first_row) * plan.blocks[piece.block_idx].row_bytes
    first = Piece(piece.block_idx, piece.layer, piece.first_row, middle, piece.slot_offset_bytes)
    return [first], [Piece(piece.block_idx, piece.layer, middle, piece.end_row, slot_offset_bytes)]


def _block_words(
    plan: ChunkPlan,
    pieces: list[Piece],
    src: PoolSide | SlotSide,
    dst: PoolSide | SlotSide,
    tables: _Tables,
    *,
    must_fold: bool,
) -> Int64Array:
    """`[num_spans, SPAN_WORDS]`: one span a piece, or, folded, one for all; in arrays, for segments have many."""
    block = plan.blocks[pieces[0].block_idx]
    cut = np.array(pieces, dtype=np.int64)
    num_rows = cut[:, _END_ROW] - cut[:, _FIRST_ROW]
    words = np.zeros((1 if must_fold else len(pieces), SPAN_WORDS), dtype=np.int64)
    words[:, 0] = block.row_bytes
    words[:, 1] = num_rows.sum() if must_fold else num_rows
    bits = _place(words[:, 3:6], src, pieces[0].block_idx, block, cut, tables, must_fold=must_fold)
    bits = bits | _place(words[:, 6:9], dst, pieces[0].block_idx, block, cut, tables, must_fold=must_fold)
    bits = bits | (block.row_bytes | MAX_WORD_BYTES)
    words[:, 2] = bits & -bits
    return words


def _place(
    places: Int64Array,
    side: PoolSide | SlotSide,
    block_idx: int,
    block: Block,
    cut: Int64Array,
    tables: _Tables,
    *,
    must_fold: bool,
) -> Int64Array:
    """Fill `places`, `[num_spans, 3]`: memory, first byte and table of one side. Returns, for each span, every bit that
    is set in any address of its rows."""
    places[:, 0] = side.memory
    if isinstance(side, SlotSide):
        return _place_in_slot(places, side, block, cut)
    if must_fold:
        return _place_folded(places, side, side.addresses[block_idx], block, cut, tables)
    return _place_in_pool(places, side, side.addresses[block_idx], block, cut, tables)


def _place_in_slot(places: Int64Array, side: SlotSide, block: Block, cut: Int64Array) -> Int64Array:
    end_bytes = int(cut[-1, _SLOT_OFFSET] + (cut[-1, _END_ROW] - cut[-1, _FIRST_ROW]) * block.row_bytes)
    if end_bytes > side.num_bytes:
        raise LayoutError(f"slot: got {side.num_bytes} bytes, expected at least {end_bytes} for the segment")
    places[:, 1] = cut[: len(places), _SLOT_OFFSET]
    places[:, 2] = LINEAR
    return places[:, 1] | side.num_bytes  # wherever the slot begins


def _place_folded(
    places: Int64Array, side: PoolSide, addresses: BlockAddresses, block: Block, cut: Int64Array, tables: _Tables
) -> Int64Array:
    offsets = np.concatenate(
        [
            addresses.row_offsets[first_row:end_row] + addresses.layer_offset_bytes(block, layer)
            for _, layer, first_row, end_row, _ in cut.tolist()
        ]
    )
    _check_rows(side, block, int(offsets.min()), int(offsets.max()))
    if _touch(offsets, block.row_bytes):
        places[:, 1], places[:, 2] = offsets[0], LINEAR
        return places[:, 1]
    places[:, 2] = tables.add(offsets)
    return np.bitwise_or.reduce(offsets, keepdims=True)


def _place_in_pool(
    places: Int64Array, side: PoolSide, addresses: BlockAddresses, block: Block, cut: Int64Array, tables: _Tables
) -> Int64Array:
    """One table for all layers, where that is shorter than one for each piece."""
    first_row, end_row = int(cut[:, _FIRST_ROW].min()), int(cut[:, _END_ROW].max())
    if end_row - first_row > int((cut[:, _END_ROW] - cut[:, _FIRST_ROW]).sum()):
        each_alone = [slice(idx, idx + 1) for idx in range(len(cut))]
        return np.concatenate(
            [_place_in_pool(places[one], side, addresses, block, cut[one], tables) for one in each_alone]
        )
    offsets = addresses.row_offsets[first_row:end_row]
    layer_idxs = cut[:, _LAYER] - block.layers.first
    layer_offsets = layer_idxs * addresses.layer_stride_bytes + addresses.base_offset_bytes
    lowest, highest = int(offsets.min()) + int(layer_offsets.min()), int(offsets.max()) + int(layer_offsets.max())
    _check_rows(side, block, lowest, highest)
    if _touch(offsets, block.row_bytes):
        places[:, 1] = layer_offsets + offsets[cut[:, _FIRST_ROW] - first_row]
        places[:, 2] = LINEAR
        return places[:, 1]
    places[:, 1] = layer_offsets
    places[:, 2] = cut[:, _FIRST_ROW] + (tables.add(offsets) - first_row)
    bits: Int64Array = layer_offsets | np.bitwise_or.reduce(offsets)
    return bits


def _touch(offsets: Int64Array, row_bytes: int) -> bool:
    """Whether the rows lie one behind the other."""
    # Looking at the ends first spares most tables the pass over all.
    if int(offsets[-1]) - int(offsets[0]) != (offsets.size - 1) * row_bytes:
        return False
    return bool((offsets[1:] - offsets[:-1] == row_bytes).all())


def _check_rows(side: PoolSide, block: Block, lowest: int, highest: int) -> None:
    last_offset_bytes = side.num_bytes - block.row_bytes
    if lowest < 0 or highest > last_offset_bytes:
        raise LayoutError(
            f"row offsets: got {lowest} to {highest}, expected 0 to {last_offset_bytes}: rows of {block.row_bytes} "
            f"bytes in a pool of {side.num_bytes} bytes"
        )
