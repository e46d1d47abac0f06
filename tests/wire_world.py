"""Small worlds of prefill and decode workers, and the naive answer: one Python loop over tokens.

Nothing here uses the product's formulas: a rank's rows are counted token by token, addresses are computed one by one,
and the value of each row is a hash of what it is.
"""

from __future__ import annotations

import functools
import hashlib
import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvxfer.layout import Group, LayerRange, Placement, PoolLayout, Shard, StatePart, TokenRange
from kvxfer.ownership import Int64Array
from kvxfer.wire import PageTable

POISON = 0xA5
GUARD_BYTES = 64


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What both sides agree on about a group."""

    name: str
    placement: Placement
    num_layers: int
    row_bytes: int = 0
    parts: tuple[StatePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one side lays its rows out."""

    page_tokens: int
    order: Literal["layer_major", "page_major"] = "layer_major"
    pad_bytes: int = 0  # behind each row, page and layer


@dataclass(frozen=True, slots=True)
class Worker:
    """A pool, and for each group the pages that hold its rows of `ranges`."""

    layout: PoolLayout
    pool: npt.NDArray[np.uint8]
    ranges: tuple[TokenRange, ...]
    pages: tuple[Int64Array, ...]

    def rows_of(self, group_idx: int) -> dict[int, int]:
        """The rank's tokens below the range's end with their local rows, counted one by one."""
        group = self.layout.groups[group_idx]
        shard = self.layout.shard if group.placement is Placement.SHARDED else Shard()
        return _count_rows(shard, self.ranges[group_idx].end)

    def table(self, group_idx: int, token_range: TokenRange) -> PageTable:
        """The part of the group's pages that holds a smaller range."""
        page_tokens = self.layout.groups[group_idx].page_tokens
        rows = self.rows_of(group_idx)
        first_page = _count_before(rows, self.ranges[group_idx].first) // page_tokens
        held = [rows[token] // page_tokens for token in rows if token_range.first <= token < token_range.end]
        wanted_pages = slice(held[0] - first_page, held[-1] - first_page + 1) if held else slice(0, 0)
        return PageTable(token_range, self.pages[group_idx][wanted_pages])

    def row_addresses(self, group_idx: int, layer: int) -> dict[int, int]:
        """The byte address of each of the rank's tokens within the range, in one layer."""
        group = self.layout.groups[group_idx]
        rows = self.rows_of(group_idx)
        first_page = _count_before(rows, self.ranges[group_idx].first) // group.page_tokens
        addresses = {}
        for token, row in rows.items():
            if token >= self.ranges[group_idx].first:
                page = int(self.pages[group_idx][row // group.page_tokens - first_page])
                addresses[token] = (
                    group.base_offset_bytes
                    + (layer - group.layers.first) * group.layer_stride_bytes
                    + page * group.page_stride_bytes
                    + row % group.page_tokens * group.row_stride_bytes
                )
        return addresses


@functools.lru_cache(maxsize=64)
def _count_rows(shard: Shard, num_tokens: int) -> dict[int, int]:
    rows: dict[int, int] = {}
    for token in range(num_tokens):
        if token // shard.interleave % shard.size == shard.rank:
            rows[token] = len(rows)
    return rows


def _count_before(rows: dict[int, int], first_token: int) -> int:
    return sum(token < first_token for token in rows)


def make_layout(
    specs: tuple[GroupSpec, ...],
    geometry: Geometry,
    num_pages: int,
    shard: Shard,
    *,
    stage: tuple[int, int] = (0, 1),
    replica: tuple[int, int] = (0, 1),
) -> PoolLayout:
    """One worker's layout; `stage` and `replica` are (index, number) of pipeline stages and equal workers."""
    groups = []
    base_offset_bytes = GUARD_BYTES + geometry.pad_bytes
    for spec in specs:
        is_state = spec.placement is Placement.STATE
        page_tokens = 1 if is_state else geometry.page_tokens
        row_bytes = sum(part.local_bytes(shard) for part in spec.parts) if is_state else spec.row_bytes
        stage_idx, num_stages = stage
        layers = LayerRange(spec.num_layers * stage_idx // num_stages, spec.num_layers * (stage_idx + 1) // num_stages)
        row_stride_bytes = row_bytes + geometry.pad_bytes
        page_bytes = page_tokens * row_stride_bytes + geometry.pad_bytes
        if geometry.order == "layer_major":
            page_stride_bytes, layer_stride_bytes = page_bytes, num_pages * page_bytes + geometry.pad_bytes
        else:
            page_stride_bytes, layer_stride_bytes = max(1, layers.num_layers) * page_bytes, page_bytes
        group = Group(
            name=spec.name,
            layers=layers,
            base_offset_bytes=base_offset_bytes,
            layer_stride_bytes=layer_stride_bytes,
            page_stride_bytes=page_stride_bytes,
            num_pages=num_pages,
            page_tokens=page_tokens,
            row_stride_bytes=row_stride_bytes,
            row_bytes=row_bytes,
            placement=spec.placement,
            parts=spec.parts,
        )
        groups.append(group)
        base_offset_bytes = group.extent_bytes + GUARD_BYTES
    return PoolLayout(groups=tuple(groups), shard=shard, dtype_tag="bf16", replica=replica[0], num_replicas=replica[1])


def make_worker(layout: PoolLayout, ranges: tuple[TokenRange, ...], rng: random.Random) -> Worker:
    """A worker with a poisoned pool and shuffled pages, exactly as many as the ranges need."""
    pool_bytes = max(group.extent_bytes for group in layout.groups) + GUARD_BYTES
    layout.check_fits(pool_bytes)
    pool = np.full(pool_bytes, POISON, dtype=np.uint8)
    pages = []
    for group, token_range in zip(layout.groups, ranges, strict=True):
        shard = layout.shard if group.placement is Placement.SHARDED else Shard()
        row, touched = 0, set()
        for token in range(token_range.end):
            if token // shard.interleave % shard.size == shard.rank:
                if token >= token_range.first:
                    touched.add(row // group.page_tokens)
                row += 1
        pages.append(np.array(rng.sample(range(group.num_pages), len(touched)), dtype=np.int64))
    return Worker(layout, pool, ranges, tuple(pages))


def row_value(group: Group, layer: int, token: int) -> npt.NDArray[np.uint8]:
    """The bytes of one row: a hash of group, layer and token."""
    return _digest(f"{group.name}/{layer}/{token}", group.row_bytes)


def state_value(group: Group, layer: int, shard: Shard) -> npt.NDArray[np.uint8]:
    """The bytes of one rank's blob: of a split part its own share."""
    parts = []
    for part in group.parts:
        whole = _digest(f"{group.name}/{layer}/{part.name}", part.num_bytes)
        share_bytes = part.num_bytes // shard.size
        parts.append(whole[shard.rank * share_bytes : (shard.rank + 1) * share_bytes] if part.split else whole)
    return np.concatenate(parts)


def _digest(key: str, num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_128(key.encode()).digest(num_bytes), dtype=np.uint8)


def fill(worker: Worker, have: tuple[tuple[TokenRange, ...], ...] | None = None) -> tuple[npt.NDArray[np.uint8], int]:
    """A copy of the worker's pool in which every row of its ranges, without those in `have`, holds its value.

    Also the bytes of all these rows.
    """
    pool, num_bytes = worker.pool.copy(), 0
    for group_idx, group in enumerate(worker.layout.groups):
        held = have[group_idx] if have is not None else ()
        for layer in range(group.layers.first, group.layers.end):
            for token, address in worker.row_addresses(group_idx, layer).items():
                if any(each.first <= token < each.end for each in held):
                    continue
                if group.placement is Placement.STATE:
                    value = state_value(group, layer, worker.layout.shard)
                else:
                    value = row_value(group, layer, token)
                pool[address : address + group.row_bytes] = value
                num_bytes += group.row_bytes
    return pool, num_bytes
