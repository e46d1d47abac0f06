"""From a segment of a chunk to what a lane of a ring holds: spans of rows and the tables of their offsets.

Layers of a block lie at a constant distance, so their spans share one table: it has as many offsets as a layer has
rows, not as the segment has. A segment with more pieces than a lane has spans folds the pieces of each block into one
span; one that still does not fit is cut into several orders. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.addresses import BlockAddresses
from kvxfer.errors import LayoutError
from kvxfer.ownership import Int64Array
from kvxfer.segments import Block, ChunkPlan, Piece
from kvxfer.streams.ring import LINEAR, MAX_SPANS, Span

_MAX_WORD_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class PoolSide:
    """Rows lie in a pool of `num_bytes`, the memory `memory` of the stream's owner, where `addresses` say."""

    memory: int
    num_bytes: int
    addresses: tuple[BlockAddresses, ...]


@dataclass(frozen=True, slots=True)
class SlotSide:
    """Rows lie one behind the other in the `num_bytes` from `first_byte` of the memory `memory`."""

    memory: int
    num_bytes: int
    first_byte: int


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """What one entry moves: at most `MAX_SPANS` spans, whose tables lie in `offsets`, `[num_offsets]` int64."""

    spans: list[Span]
    offsets: Int64Array


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one side keeps a span's rows, as in `Span`; `bits` has every bit that is set in any of their addresses."""

    first_byte: int
    table: int
    bits: int


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
        return np.concatenate(self._parts) if self._parts else np.empty(0, dtype=np.int64)


def segment_orders(
    plan: ChunkPlan, segment: int, src: PoolSide | SlotSide, dst: PoolSide | SlotSide, max_offsets: int
) -> list[Order]:
    """The orders that together copy a segment from `src` to `dst`, for lanes of `max_offsets` offsets. One, but for
    segments of very many rows or blocks.

    Raises `LayoutError` where a row lies outside its pool or the segment is larger than its slot.
    """
    return _orders(plan, plan.pieces(segment), src, dst, max_offsets)


def _orders(
    plan: ChunkPlan, pieces: Sequence[Piece], src: PoolSide | SlotSide, dst: PoolSide | SlotSide, max_offsets: int
) -> list[Order]:
    tables = _Tables()
    must_fold = len(pieces) > MAX_SPANS
    spans: list[Span] = []
    for of_block in _by_block(pieces):
        block = plan.blocks[of_block[0].block_idx]
        src_places = _places(src, block, of_block, tables, must_fold=must_fold)
        dst_places = _places(dst, block, of_block, tables, must_fold=must_fold)
        num_rows = [piece.end_row - piece.first_row for piece in of_block]
        for num, src_place, dst_place in zip(
            [sum(num_rows)] if must_fold else num_rows, src_places, dst_places, strict=True
        ):
            spans.append(_span(block.row_bytes, num, src.memory, src_place, dst.memory, dst_place))
    if len(spans) <= MAX_SPANS and tables.num_offsets <= max_offsets:
        return [Order(spans, tables.offsets())]
    first, second = _halves(plan, pieces)
    return [*_orders(plan, first, src, dst, max_offsets), *_orders(plan, second, src, dst, max_offsets)]


def _by_block(pieces: Sequence[Piece]) -> list[list[Piece]]:
    found: list[list[Piece]] = []
    for piece in pieces:
        if not found or found[-1][0].block_idx != piece.block_idx:
            found.append([])
        found[-1].append(piece)
    return found


def _halves(plan: ChunkPlan, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Cut in two, neither empty: a single row needs no table and always fits."""
    if len(pieces) > 1:
        return list(pieces[: len(pieces) // 2]), list(pieces[len(pieces) // 2 :])
    (piece,) = pieces
    middle = (piece.first_row + piece.end_row) // 2
    slot_offset_bytes = piece.slot_offset_bytes + (middle - piece.first_row) * plan.blocks[piece.block_idx].row_bytes
    first = Piece(piece.block_idx, piece.layer, piece.first_row, middle, piece.slot_offset_bytes)
    return [first], [Piece(piece.block_idx, piece.layer, middle, piece.end_row, slot_offset_bytes)]


def _span(row_bytes: int, num_rows: int, src_memory: int, src: _Place, dst_memory: int, dst: _Place) -> Span:
    bits = src.bits | dst.bits | row_bytes | _MAX_WORD_BYTES
    return Span(
        row_bytes=row_bytes,
        num_rows=num_rows,
        word_bytes=bits & -bits,
        src_memory=src_memory,
        src_first_byte=src.first_byte,
        src_table=src.table,
        dst_memory=dst_memory,
        dst_first_byte=dst.first_byte,
        dst_table=dst.table,
    )


def _places(
    side: PoolSide | SlotSide, block: Block, pieces: list[Piece], tables: _Tables, *, must_fold: bool
) -> list[_Place]:
    """One place a piece, or, folded, one for all."""
    if isinstance(side, SlotSide):
        return _slot_places(side, block, pieces[:1] if must_fold else pieces, pieces[-1])
    if must_fold:
        return [_folded(side, block, pieces, tables)]
    return _pool_places(side, block, pieces, tables)


def _slot_places(side: SlotSide, block: Block, pieces: list[Piece], last: Piece) -> list[_Place]:
    end_bytes = last.slot_offset_bytes + (last.end_row - last.first_row) * block.row_bytes
    if end_bytes > side.num_bytes:
        raise LayoutError(f"slot: got {side.num_bytes} bytes, expected at least {end_bytes} for the segment")
    firsts = [side.first_byte + piece.slot_offset_bytes for piece in pieces]
    return [_Place(first, LINEAR, first) for first in firsts]


def _folded(side: PoolSide, block: Block, pieces: list[Piece], tables: _Tables) -> _Place:
    addresses = side.addresses[pieces[0].block_idx]
    offsets = np.concatenate(
        [
            addresses.row_offsets[piece.first_row : piece.end_row] + addresses.layer_offset_bytes(block, piece.layer)
            for piece in pieces
        ]
    )
    _check_rows(side, block, int(offsets.min()), int(offsets.max()))
    if _touch(offsets, block.row_bytes):
        first_byte = int(offsets[0])
        return _Place(first_byte, LINEAR, first_byte)
    return _Place(0, tables.add(offsets), int(np.bitwise_or.reduce(offsets)))


def _pool_places(side: PoolSide, block: Block, pieces: list[Piece], tables: _Tables) -> list[_Place]:
    """One table for all layers, where that is shorter than one for each piece."""
    first_row, end_row = min(piece.first_row for piece in pieces), max(piece.end_row for piece in pieces)
    if end_row - first_row > sum(piece.end_row - piece.first_row for piece in pieces):
        return [place for piece in pieces for place in _pool_places(side, block, [piece], tables)]
    addresses = side.addresses[pieces[0].block_idx]
    offsets = addresses.row_offsets[first_row:end_row]
    layer_offsets = [addresses.layer_offset_bytes(block, piece.layer) for piece in pieces]
    _check_rows(side, block, int(offsets.min()) + min(layer_offsets), int(offsets.max()) + max(layer_offsets))
    if _touch(offsets, block.row_bytes):
        firsts = [
            layer_offset + int(offsets[piece.first_row - first_row])
            for piece, layer_offset in zip(pieces, layer_offsets, strict=True)
        ]
        return [_Place(first_byte, LINEAR, first_byte) for first_byte in firsts]
    table, bits = tables.add(offsets), int(np.bitwise_or.reduce(offsets))
    return [
        _Place(layer_offset, table + piece.first_row - first_row, bits | layer_offset)
        for piece, layer_offset in zip(pieces, layer_offsets, strict=True)
    ]


def _touch(offsets: Int64Array, row_bytes: int) -> bool:
    """Whether the rows lie one behind the other."""
    # Looking at the ends first spares most tables the pass over all.
    if int(offsets[-1]) - int(offsets[0]) != (offsets.size - 1) * row_bytes:
        return False
    return bool((np.diff(offsets) == row_bytes).all())


def _check_rows(side: PoolSide, block: Block, lowest: int, highest: int) -> None:
    last_offset_bytes = side.num_bytes - block.row_bytes
    if lowest < 0 or highest > last_offset_bytes:
        raise LayoutError(
            f"row offsets: got {lowest} to {highest}, expected 0 to {last_offset_bytes}: rows of {block.row_bytes} "
            f"bytes in a pool of {side.num_bytes} bytes"
        )
