"""Small worlds of prefill and decode agents, and what each rank owns, counted token by token.

Rows have four bytes: request, group and layer, token. Nothing here uses the product's formulas but to cache the plans
that the cores ask for again and again: a world has few routes and few token ranges.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

import kvxfer.decode.chunks
import kvxfer.decode.lifecycle
import kvxfer.prefill.lifecycle
import kvxfer.prefill.planning
import kvxfer.routes
import kvxfer.wire
from kvxfer.layout import Group, Placement, PoolLayout, Shard
from kvxfer.routes import Route, match_layouts
from tests.wire_world import Geometry, GroupSpec, make_layout

ROW_BYTES = 4
SLOT_BYTES = 3 * ROW_BYTES  # no multiple of a page: segments begin and end in the middle of one
PAGE_TOKENS = 2
MAX_TOKENS = 9
POOL_PAGES = 40
_KV = GroupSpec("kv", Placement.SHARDED, num_layers=2, row_bytes=ROW_BYTES)
_DRAFT = GroupSpec("draft", Placement.REPLICATED, num_layers=1, row_bytes=ROW_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Pools of the prefill workers, and of the decode workers of each decode group."""

    name: str
    prefill: tuple[PoolLayout, ...]
    decode: tuple[tuple[PoolLayout, ...], ...]  # by decode group, by rank

    def route(self, prefill_idx: int, group_idx: int, rank: int) -> Route:
        """The route of a pair, always the same object."""
        return _route(self, prefill_idx, group_idx, rank)


@cache
def _route(topology: Topology, prefill_idx: int, group_idx: int, rank: int) -> Route:
    ranks = topology.decode[group_idx]
    return match_layouts(topology.prefill[prefill_idx], ranks[rank], rank, len(ranks))


def _layout(
    specs: tuple[GroupSpec, ...],
    shard: Shard = Shard(),  # noqa: B008 - frozen
    stage: tuple[int, int] = (0, 1),
    replica: tuple[int, int] = (0, 1),
    page_tokens: int = PAGE_TOKENS,
) -> PoolLayout:
    return make_layout(specs, Geometry(page_tokens), POOL_PAGES, shard, stage=stage, replica=replica)


def _topologies() -> tuple[Topology, ...]:
    kv, both = (_KV,), (_KV, _DRAFT)
    one, one_draft = _layout(kv), _layout(both)
    halves = tuple(_layout(kv, Shard(rank, 2)) for rank in range(2))
    draft_halves = tuple(_layout(both, Shard(rank, 2)) for rank in range(2))
    coarse = tuple(_layout(kv, Shard(rank, 2, 2), page_tokens=3) for rank in range(2))
    stages = tuple(_layout(kv, stage=(idx, 2)) for idx in range(2))
    replicas = tuple(_layout(kv, replica=(idx, 2)) for idx in range(2))
    return (
        Topology("one to one", (one,), ((one,),)),
        Topology("one to two ranks", (one_draft,), (draft_halves,)),
        Topology("one to two holders of the same shard", (one,), ((one, one),)),
        Topology("one to two decode groups", (one,), ((one,), (one,))),
        Topology("two stages to one", stages, ((one,),)),
        Topology("two stages to two ranks", stages, (halves,)),
        Topology("two replicas to two ranks", replicas, (halves,)),
        Topology("two shards to two coarser ranks", halves, (coarse,)),
        Topology("two shards to two decode groups", halves, ((one,), (one,))),
    )


TOPOLOGIES = _topologies()


def row_value(request: int, group: Group, layer: int, token: int) -> bytes:
    """The bytes of a row, different for every row of every request."""
    return struct.pack(">HBB", request, 16 + layer + (8 if group.placement is Placement.REPLICATED else 0), token + 1)


def owned_rows(layout: PoolLayout, group: Group, num_tokens: int) -> dict[int, int]:
    """The tokens below `num_tokens` that the layout's rank holds, with their local rows."""
    rows: dict[int, int] = {}
    shard = layout.shard
    for token in range(num_tokens):
        if group.placement is Placement.REPLICATED or token // shard.interleave % shard.size == shard.rank:
            rows[token] = len(rows)
    return rows


def row_offset(group: Group, layer: int, page: int, row: int) -> int:
    """Where local row `row`, which lies in pool page `page`, begins in the pool."""
    return (
        group.base_offset_bytes
        + (layer - group.layers.first) * group.layer_stride_bytes
        + page * group.page_stride_bytes
        + row % group.page_tokens * group.row_stride_bytes
    )


_plans: dict[Any, Any] = {}


def _cached(function: Callable[..., Any], route_of: Callable[[Any], Any]) -> Callable[..., Any]:
    def cached(first: Any, *rest: Any) -> Any:  # noqa: ANN401
        key = (function, route_of(first), *map(_frozen, rest))
        if key not in _plans:
            _plans[key] = function(first, *rest)
        return _plans[key]

    return cached


def _frozen(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, PoolLayout):
        return id(value)
    return tuple(map(_frozen, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value


@contextmanager
def cached_plans() -> Iterator[None]:
    """Let the cores look plans up. Plans are immutable, and routes live as long as `TOPOLOGIES`."""
    patch = pytest.MonkeyPatch()
    plan_chunk = _cached(kvxfer.wire.plan_chunk, id)
    check_complete = _cached(kvxfer.routes.check_complete, lambda routes: tuple(map(id, routes)))
    for module in (
        kvxfer.prefill.lifecycle,
        kvxfer.prefill.planning,
        kvxfer.decode.lifecycle,
        kvxfer.decode.chunks,
    ):
        patch.setattr(module, "plan_chunk", plan_chunk)
    patch.setattr(kvxfer.decode.lifecycle, "check_complete", check_complete)
    try:
        yield
    finally:
        patch.undo()
