"""Moves rows between a host pool and slots: the packer and the landing of pools in host memory.

A row is one element of a `void` dtype of `row_bytes`, so any layout, any stride and any row size is one index
array, and numpy copies with the GIL released. Several threads share a segment through `split_pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.addresses import BlockAddresses
from kvxfer.errors import LayoutError
from kvxfer.ownership import Int64Array
from kvxfer.segments import ChunkPlan, Piece

ByteArray = npt.NDArray[np.uint8]

# Rows that lie on no common grid are gathered through a temporary array of this size, small enough to stay in the
# second-level cache; a whole segment at once is a third slower.
_STAGE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """Rows of one block that lie one behind the other in the slot: row `i` at `pool_offsets[i]`."""

    pool_offsets: Int64Array  # [num_rows]
    row_bytes: int
    slot_offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.pool_offsets.size * self.row_bytes


def gather_segment(
    pool: ByteArray, plan: ChunkPlan, addresses: tuple[BlockAddresses, ...], segment_idx: int, slot: ByteArray
) -> int:
    """Copy a segment's rows from `pool` (`[pool_bytes]` uint8) into the first bytes of `slot` (`[slot_bytes]` uint8).

    Returns the bytes written. Raises `LayoutError`, before a byte moves, where a row or the segment lies outside.
    """
    return gather_pieces(pool, plan, addresses, plan.pieces(segment_idx), slot)


def scatter_segment(
    pool: ByteArray, plan: ChunkPlan, addresses: tuple[BlockAddresses, ...], segment_idx: int, slot: ByteArray
) -> int:
    """Copy a segment from `slot` into its rows of `pool`: `gather_segment` the other way round."""
    return scatter_pieces(pool, plan, addresses, plan.pieces(segment_idx), slot)


def gather_pieces(
    pool: ByteArray, plan: ChunkPlan, addresses: tuple[BlockAddresses, ...], pieces: Sequence[Piece], slot: ByteArray
) -> int:
    """`gather_segment` for some pieces of a segment, in wire order and without gaps between them."""
    moves = _checked_moves(pool, plan, addresses, pieces, slot.size)
    for move in moves:
        _gather(pool, move, slot)
    return sum(move.num_bytes for move in moves)


def scatter_pieces(
    pool: ByteArray, plan: ChunkPlan, addresses: tuple[BlockAddresses, ...], pieces: Sequence[Piece], slot: ByteArray
) -> int:
    """`scatter_segment` for some pieces of a segment, in wire order and without gaps between them."""
    moves = _checked_moves(pool, plan, addresses, pieces, slot.size)
    for move in moves:
        row_windows(pool, move.row_bytes)[move.pool_offsets] = _slot_rows(move, slot)
    return sum(move.num_bytes for move in moves)


def split_pieces(plan: ChunkPlan, pieces: Sequence[Piece], num_jobs: int) -> list[list[Piece]]:
    """Cut a segment's pieces into at most `num_jobs` lists of about equal bytes, one for each thread; none is empty."""
    total_bytes = sum((piece.end_row - piece.first_row) * plan.blocks[piece.block_idx].row_bytes for piece in pieces)
    job_bytes = max(1, -(-total_bytes // num_jobs))
    jobs: list[list[Piece]] = []
    room_bytes = 0
    for piece in pieces:
        row_bytes = plan.blocks[piece.block_idx].row_bytes
        first_row = piece.first_row
        while first_row < piece.end_row:
            if room_bytes <= 0:  # a row larger than a job's share used up some of the next shares, too
                jobs.append([])
                room_bytes = job_bytes - -room_bytes % job_bytes
            end_row = min(piece.end_row, first_row + -(-room_bytes // row_bytes))
            slot_offset_bytes = piece.slot_offset_bytes + (first_row - piece.first_row) * row_bytes
            jobs[-1].append(Piece(piece.block_idx, piece.layer, first_row, end_row, slot_offset_bytes))
            room_bytes -= (end_row - first_row) * row_bytes
            first_row = end_row
    return jobs


def _checked_moves(
    pool: ByteArray, plan: ChunkPlan, addresses: tuple[BlockAddresses, ...], pieces: Sequence[Piece], slot_bytes: int
) -> list[_Move]:
    moves = list(_merge(plan, addresses, pieces))
    for move in moves:
        last_offset_bytes = pool.size - move.row_bytes
        if move.pool_offsets.min() < 0 or move.pool_offsets.max() > last_offset_bytes:
            raise LayoutError(
                f"row offsets: got {int(move.pool_offsets.min())} to {int(move.pool_offsets.max())}, expected 0 to "
                f"{last_offset_bytes}: rows of {move.row_bytes} bytes in a pool of {pool.size} bytes"
            )
        end_bytes = move.slot_offset_bytes + move.num_bytes
        if end_bytes > slot_bytes:
            raise LayoutError(f"slot: got {slot_bytes} bytes, expected at least {end_bytes} for the segment")
    return moves


def _merge(plan: ChunkPlan, addresses: tuple[BlockAddresses, ...], pieces: Sequence[Piece]) -> Iterator[_Move]:
    """One move a block: a block with few tokens has a piece for every layer, and a call for each would cost more."""
    first_idx = 0
    for end_idx in range(1, len(pieces) + 1):
        block_idx = pieces[first_idx].block_idx
        if end_idx < len(pieces) and pieces[end_idx].block_idx == block_idx:
            continue
        block, of_block = plan.blocks[block_idx], addresses[block_idx]
        offsets = [
            of_block.row_offsets[piece.first_row : piece.end_row] + of_block.layer_offset_bytes(block, piece.layer)
            for piece in pieces[first_idx:end_idx]
        ]
        pool_offsets = np.concatenate(offsets) if len(offsets) > 1 else offsets[0]
        yield _Move(pool_offsets, block.row_bytes, pieces[first_idx].slot_offset_bytes)
        first_idx = end_idx


def row_windows(pool: ByteArray, row_bytes: int) -> npt.NDArray[np.void]:
    """`pool` as rows of `row_bytes` that begin at every byte: one index a row, whatever the layout."""
    return np.ndarray(pool.size - row_bytes + 1, _row_dtype(row_bytes), pool, strides=(1,))


def _row_dtype(row_bytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, row_bytes))


def _slot_rows(move: _Move, slot: ByteArray) -> npt.NDArray[np.void]:
    return slot[move.slot_offset_bytes : move.slot_offset_bytes + move.num_bytes].view(_row_dtype(move.row_bytes))


def _gather(pool: ByteArray, move: _Move, slot: ByteArray) -> None:
    slot_rows = _slot_rows(move, slot)
    phase_bytes = int(move.pool_offsets[0]) % move.row_bytes
    grid_rows = (move.pool_offsets - phase_bytes) // move.row_bytes
    if np.array_equal(grid_rows * move.row_bytes + phase_bytes, move.pool_offsets):
        num_grid_rows = (pool.size - phase_bytes) // move.row_bytes
        grid = pool[phase_bytes : phase_bytes + num_grid_rows * move.row_bytes].view(slot_rows.dtype)
        # With another mode `take` would copy through a temporary array, and so it would from strided rows.
        np.take(grid, grid_rows, out=slot_rows, mode="clip")
        return
    windows = row_windows(pool, move.row_bytes)
    stage_rows = max(1, _STAGE_BYTES // move.row_bytes)
    for first in range(0, slot_rows.size, stage_rows):
        slot_rows[first : first + stage_rows] = windows[move.pool_offsets[first : first + stage_rows]]
