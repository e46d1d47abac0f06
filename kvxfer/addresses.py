"""From the wire order to one side's bytes: page tables, row offsets and, for mode `raw`, runs of touching rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvxfer.errors import LayoutError
from kvxfer.layout import Group, Placement, PoolLayout, Shard, TokenRange
from kvxfer.ownership import Int64Array, local_len, local_row, num_pages_of
from kvxfer.routes import Route
from kvxfer.segments import Block, ChunkPlan, Piece


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """One side's pages of one group: `pages` `[num_pages]` int64 hold the rank's rows of `token_range`, in order."""

    token_range: TokenRange
    pages: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class BlockAddresses:
    """Where one side keeps a block's rows.

    Row `i` in global layer `l` is the `row_bytes` bytes from
    `base_offset_bytes + (l - block.layers.first) * layer_stride_bytes + row_offsets[i]` of the pool.
    """

    base_offset_bytes: int
    layer_stride_bytes: int
    row_offsets: Int64Array  # [num_rows]
    row_bytes: int

    def layer_offset_bytes(self, block: Block, layer: int) -> int:
        """The place that `row_offsets` count from in global layer `layer`."""
        return self.base_offset_bytes + (layer - block.layers.first) * self.layer_stride_bytes


def group_shard(group: Group, shard: Shard) -> Shard:
    """The shard that decides on a group's rows: only sharded groups are split."""
    return shard if group.placement is Placement.SHARDED else Shard()


def check_pages(group: Group, shard: Shard, token_range: TokenRange, pages: Int64Array) -> None:
    """Raise `LayoutError` unless `pages` (`[num_pages]` int64) can hold the rank's rows of `token_range`.

    Their number must be exactly `num_pages_of`, every id in `[0, group.num_pages)`, none named twice.
    """
    where = f"group {group.name!r}"
    if pages.ndim != 1 or pages.dtype != np.int64:
        raise LayoutError(f"{where}: pages: got {pages.ndim} dimensions of {pages.dtype}, expected one of int64")
    if group.placement is Placement.STATE and token_range.end > 1:
        raise LayoutError(
            f"{where}: token range: got [{token_range.first}, {token_range.end}), "
            "expected [0, 1) for a state blob or [0, 0) for none"
        )
    num_expected = num_pages_of(group_shard(group, shard), group.page_tokens, token_range)
    if pages.size != num_expected:
        raise LayoutError(
            f"{where}: pages: got {pages.size}, expected {num_expected} for tokens [{token_range.first}, "
            f"{token_range.end}) on rank {shard.rank} of {shard.size}, {group.page_tokens} rows a page"
        )
    if not pages.size:
        return
    ordered = np.sort(pages)
    if ordered[0] < 0 or ordered[-1] >= group.num_pages:
        bad_id = int(ordered[0] if ordered[0] < 0 else ordered[-1])
        raise LayoutError(f"{where}: pages: got page {bad_id}, expected ids from 0 to below {group.num_pages}")
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        raise LayoutError(f"{where}: pages: got page {int(ordered[twice[0]])} twice, expected each page once")


def resolve(
    plan: ChunkPlan, route: Route, side: Literal["src", "dst"], layout: PoolLayout, tables: tuple[PageTable, ...]
) -> tuple[BlockAddresses, ...]:
    """One side's addresses of the plan's blocks, parallel to `plan.blocks`.

    `layout` is that side's pool, `tables` its pages, checked by `check_pages`, in the order of `route.groups`.
    Raises `LayoutError` where a table does not reach over the plan's tokens.
    """
    shard = route.src_shard if side == "src" else route.dst_shard
    resolved = []
    for block in plan.blocks:
        wire_group = route.groups[block.group_idx]
        group = layout.groups[wire_group.src_idx if side == "src" else wire_group.dst_idx]
        table = tables[block.group_idx]
        if group.placement is Placement.STATE:
            first_byte = block.src_first_byte if side == "src" else block.dst_first_byte
            row_offsets = _state_offsets(group, table, block, first_byte)
        else:
            row_offsets = _row_offsets(group, group_shard(group, shard), table, block.tokens)
        layer_idx = block.layers.first - group.layers.first
        base_offset_bytes = group.base_offset_bytes + layer_idx * group.layer_stride_bytes
        resolved.append(BlockAddresses(base_offset_bytes, group.layer_stride_bytes, row_offsets, block.row_bytes))
    return tuple(resolved)


def _state_offsets(group: Group, table: PageTable, block: Block, first_byte: int) -> Int64Array:
    if table.pages.size != 1:
        raise LayoutError(f"group {group.name!r}: pages: got {table.pages.size}, expected 1 for a state blob")
    rows = np.arange(block.num_rows, dtype=np.int64)
    return rows * block.row_bytes + (int(table.pages[0]) * group.page_stride_bytes + first_byte)


def _row_offsets(group: Group, shard: Shard, table: PageTable, tokens: Int64Array) -> Int64Array:
    """Offset of each token's row within a layer. Group and page ids are bounded, so nothing overflows."""
    token_range = table.token_range
    if tokens[0] < token_range.first or tokens[-1] >= token_range.end:
        raise LayoutError(
            f"group {group.name!r}: pages are for tokens [{token_range.first}, {token_range.end}), "
            f"but the plan needs [{int(tokens[0])}, {int(tokens[-1]) + 1})"
        )
    rows = local_row(tokens, shard)
    pages = rows // group.page_tokens
    rows_in_page = rows - pages * group.page_tokens
    pages -= local_len(shard, token_range.first) // group.page_tokens
    if pages[-1] >= table.pages.size:
        raise LayoutError(
            f"group {group.name!r}: pages: got {table.pages.size}, expected at least {int(pages[-1]) + 1}"
        )
    offsets = (table.pages * group.page_stride_bytes)[pages]
    rows_in_page *= group.row_stride_bytes
    offsets += rows_in_page
    return offsets


def runs(addresses: BlockAddresses, piece: Piece, block: Block) -> tuple[Int64Array, Int64Array, Int64Array]:
    """A piece as runs of rows that touch in the pool: `src_offsets`, `slot_offsets`, `lengths`.

    Each `[num_runs]` int64, in bytes; `src_offsets` count from the start of the pool, `slot_offsets` from that of the
    slot.
    """
    offsets = addresses.row_offsets[piece.first_row : piece.end_row]
    row_bytes = addresses.row_bytes
    first_rows = np.concatenate(([0], np.flatnonzero(np.diff(offsets) != row_bytes) + 1))
    lengths = np.diff(first_rows, append=offsets.size) * row_bytes
    src_offsets = offsets[first_rows] + addresses.layer_offset_bytes(block, piece.layer)
    return src_offsets, first_rows * row_bytes + piece.slot_offset_bytes, lengths


def count_runs(plan: ChunkPlan, addresses: tuple[BlockAddresses, ...]) -> int:
    """Runs of all pieces of the chunk: the descriptors of a sender that does not pack."""
    num_runs = 0
    for block, cut, block_addresses in zip(plan.blocks, plan.cuts, addresses, strict=True):
        # breaks[i]: a run begins at row i of a layer; every layer begins one.
        breaks = np.ones(block.num_rows, dtype=np.bool_)
        breaks[1:] = np.diff(block_addresses.row_offsets) != block.row_bytes
        num_runs += block.layers.num_layers * int(np.count_nonzero(breaks))
        # A segment that begins within a run splits it.
        segment_firsts = np.arange(cut.head_rows, block.num_wire_rows, cut.segment_rows) % block.num_rows
        num_runs += int(np.count_nonzero(~breaks[segment_firsts]))
    return num_runs
