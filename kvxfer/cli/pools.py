"""Pools of the demo and the bench: groups one behind the other with guard bytes between, pages in random order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvxfer.cli.protocol import Chunk, PageList
from kvxfer.layout import Group, LayerRange, Placement, PoolLayout, Shard, StatePart, TokenRange
from kvxfer.ownership import local_len
from kvxfer.wire import PageTable, count_runs, match_layouts, plan_chunk, resolve

GUARD_BYTES = 4096
SPARE_PAGES = 3
"""Pages that no transfer uses: nothing may touch them either."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What both sides of a transfer have in common of one group."""

    name: str
    layers: LayerRange
    row_bytes: int
    placement: Placement
    parts: tuple[StatePart, ...] = ()


def state_parts(state_bytes: int, num_ranks: int) -> tuple[StatePart, ...]:
    """About half of the state split evenly over the ranks, the rest held by every rank."""
    split_bytes = state_bytes // 2 // num_ranks * num_ranks
    parts = (StatePart("split", split_bytes, split=True),) if split_bytes else ()
    return (*parts, StatePart("whole", state_bytes - split_bytes)) if state_bytes > split_bytes else parts


def lay_out(
    shapes: list[GroupShape], num_pages: dict[str, int], page_tokens: int, shard: Shard, dtype_tag: str
) -> tuple[PoolLayout, int]:
    """The layout of one worker's pool and its size in bytes. Layers lie one behind the other, rows without gaps."""
    groups = []
    offset_bytes = GUARD_BYTES
    for shape in shapes:
        is_state = shape.placement is Placement.STATE
        row_bytes = sum(part.local_bytes(shard) for part in shape.parts) if is_state else shape.row_bytes
        rows_per_page = 1 if is_state else page_tokens
        page_bytes = rows_per_page * row_bytes
        group = Group(
            name=shape.name,
            layers=shape.layers,
            base_offset_bytes=offset_bytes,
            layer_stride_bytes=num_pages[shape.name] * page_bytes,
            page_stride_bytes=page_bytes,
            num_pages=num_pages[shape.name],
            page_tokens=rows_per_page,
            row_stride_bytes=row_bytes,
            row_bytes=row_bytes,
            placement=shape.placement,
            parts=shape.parts,
        )
        groups.append(group)
        offset_bytes = group.extent_bytes + GUARD_BYTES
    return PoolLayout(groups=tuple(groups), shard=shard, dtype_tag=dtype_tag), offset_bytes


def choose_pages(num_needed: int, num_pages: int, shuffled: bool, seed: int) -> list[int]:
    """Page ids for a sequence: any of the pool's pages in any order, or neighbours in ascending order."""
    if not shuffled:
        return list(range(num_needed))
    return [int(page) for page in np.random.default_rng(seed).permutation(num_pages)[:num_needed]]


@dataclass(frozen=True, slots=True)
class Paging:
    """Where one group of a sequence lies: `src_pages` in the source pool, `dst_pages[rank]` in each decode pool.

    The first `num_received[rank]` of those get the rows of tokens `[0, end_token)`; the rest is kept for later tokens.
    """

    end_token: int
    page_tokens: int
    src_pages: list[int]
    dst_pages: list[list[int]]
    num_received: list[int]

    def chunk(self, first_token: int, end_token: int) -> PageList:
        """The source pages of some tokens."""
        if first_token == end_token:
            return PageList(first_token=first_token, end_token=end_token, pages=[])
        first_page, end_page = first_token // self.page_tokens, -(-end_token // self.page_tokens)
        return PageList(first_token=first_token, end_token=end_token, pages=self.src_pages[first_page:end_page])

    def receive(self, rank: int) -> PageList:
        """Everything that a decode rank receives."""
        return PageList(first_token=0, end_token=self.end_token, pages=self.dst_pages[rank][: self.num_received[rank]])

    def none_of_it(self) -> Paging:
        """No tokens at all. A transfer of this makes agents pair, which happens once and is part of no other."""
        return replace(self, end_token=0, num_received=[0] * len(self.dst_pages))


def page_tables(
    placement: Placement,
    num_tokens: int,
    page_tokens: int,
    num_ranks: int,
    interleave: int,
    shuffled: bool,
    num_later: int = 0,
) -> Paging:
    """Pages at an unsharded source and at each rank, for `num_tokens` tokens and `num_later` that are decoded later."""
    num_all = num_tokens + num_later
    num_src = -(-num_all // page_tokens)
    dst_pages, num_received = [], []
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks, interleave) if placement is Placement.SHARDED else Shard()
        num_pages, num_first = (-(-local_len(shard, num) // page_tokens) for num in (num_all, num_tokens))
        dst_pages.append(choose_pages(num_pages, num_pages + SPARE_PAGES, shuffled, seed=rank + 1))
        num_received.append(num_first)
    src_pages = choose_pages(num_src, num_src + SPARE_PAGES, shuffled, seed=0)
    return Paging(num_tokens, page_tokens, src_pages, dst_pages, num_received)


def cut_chunks(pagings: dict[str, Paging], states: frozenset[str], num_tokens: int, chunk_tokens: int) -> list[Chunk]:
    """The submits of a prefill in chunks. State goes with the last; no tokens at all still make one chunk."""
    chunks = []
    for first in range(0, max(num_tokens, 1), chunk_tokens):
        end = min(first + chunk_tokens, num_tokens)
        last = end == num_tokens
        groups = {name: paging.chunk(first, end) for name, paging in pagings.items() if name not in states}
        if last:
            groups |= {name: pagings[name].chunk(0, pagings[name].end_token) for name in states}
        chunks.append(Chunk(groups=groups, last=last))
    return chunks


def count_raw_descriptors(
    src: PoolLayout, dst: PoolLayout, pagings: dict[str, Paging], chunks: list[Chunk], segment_bytes: int
) -> int:
    """Descriptors that a sender needs for one rank if it does not pack: as the agents plan it."""
    route = match_layouts(src, dst, dst.shard.rank, dst.shard.size)
    names = [group.name for group in route.groups]
    wanted = tuple(TokenRange(0, pagings[name].end_token) for name in names)
    num_runs = 0
    for chunk in chunks:
        pages = [chunk.groups.get(name, PageList(first_token=0, end_token=0, pages=[])) for name in names]
        ranges = tuple(TokenRange(each.first_token, each.end_token) for each in pages)
        plan = plan_chunk(route, ranges, wanted, ((),) * len(names), None, segment_bytes)
        tables = tuple(
            PageTable(token_range, np.asarray(each.pages, dtype=np.int64))
            for token_range, each in zip(ranges, pages, strict=True)
        )
        num_runs += count_runs(plan, resolve(plan, route, "src", src, tables))
    return num_runs
