"""What does not fit together is refused at pairing; sources that leave or repeat rows are refused before a transfer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from kvxfer.errors import PairingError
from kvxfer.layout import LayerRange, Placement, PoolLayout, Shard, StatePart, TokenRange
from kvxfer.routes import Route, subtract
from kvxfer.wire import check_complete, match_layouts
from tests.wire_world import Geometry, GroupSpec, make_layout

KV = GroupSpec("kv", Placement.SHARDED, 4, 13)
DRAFT = GroupSpec("draft", Placement.REPLICATED, 4, 7)
STATE = GroupSpec("state", Placement.STATE, 4, parts=(StatePart("conv", 60), StatePart("ssm", 120, split=True)))
SPECS = (KV, DRAFT, STATE)
WANTED = (TokenRange(5, 50), TokenRange(0, 50), TokenRange(0, 1))


def layout(
    shard: Shard,
    specs: tuple[GroupSpec, ...] = SPECS,
    stage: tuple[int, int] = (0, 1),
    replica: tuple[int, int] = (0, 1),
) -> PoolLayout:
    return make_layout(specs, Geometry(4), 60, shard, stage=stage, replica=replica)


def routes_to(dst: PoolLayout, sources: Sequence[PoolLayout], dst_rank: int = 0, dst_world: int = 4) -> list[Route]:
    return [match_layouts(src, dst, dst_rank, dst_world) for src in sources]


@pytest.mark.parametrize(
    ("src_specs", "message"),
    [
        ((KV, DRAFT), r"groups: got \['draft', 'kv'\] at the source, expected 'state' among them"),
        ((*SPECS, GroupSpec("extra", Placement.SHARDED, 1, 1)), r"groups: got 'extra' at the source, expected only"),
        ((GroupSpec("kv", Placement.SHARDED, 4, 14), DRAFT, STATE), r"'kv': row_bytes: got 14 at .* expected 13"),
        ((GroupSpec("kv", Placement.REPLICATED, 4, 13), DRAFT, STATE), r"'kv': placement: got 'replicated' at"),
        ((KV, DRAFT, GroupSpec("state", Placement.STATE, 4, parts=STATE.parts[:1])), r"'state': parts: got \(StateP"),
        ((KV, DRAFT, GroupSpec("state", Placement.STATE, 4, parts=STATE.parts[::-1])), r"'state': parts: got"),
    ],
)
def test_groups_that_differ(src_specs: tuple[GroupSpec, ...], message: str) -> None:
    with pytest.raises(PairingError, match=message):
        match_layouts(layout(Shard(), src_specs), layout(Shard()), 0, 1)


def test_other_fields_that_differ() -> None:
    dst = layout(Shard(1, 4))
    fp8 = msgspec.structs.replace(dst, dtype_tag="fp8_e4m3", shard=dst.shard)
    with pytest.raises(PairingError, match=r"dtype_tag: got 'fp8_e4m3' at the source, expected 'bf16'"):
        match_layouts(fp8, dst, 1, 4)
    with pytest.raises(PairingError, match=r"dst_rank: got 4, expected 0 to dst_world - 1 = 3"):
        match_layouts(layout(Shard()), dst, 4, 4)
    with pytest.raises(PairingError, match=r"dst_world: got 3, expected at least dst.shard.size 4"):
        match_layouts(layout(Shard()), dst, 1, 3)


def test_groups_meet_by_name_and_layers_intersect() -> None:
    src = layout(Shard(), SPECS[::-1], stage=(1, 2))
    route = match_layouts(src, layout(Shard(2, 3)), 2, 3)
    assert [(group.name, group.src_idx, group.dst_idx) for group in route.groups] == [
        ("kv", 2, 0),
        ("draft", 1, 1),
        ("state", 0, 2),
    ]
    assert {group.layers for group in route.groups} == {LayerRange(2, 4)}


@pytest.mark.parametrize(("num_replicas", "src_size", "dst_world"), list(itertools.product([1, 2, 3], repeat=3)))
def test_replicas_and_shards_share_the_sending(num_replicas: int, src_size: int, dst_world: int) -> None:
    sources = [
        layout(Shard(rank, src_size), replica=(replica, num_replicas))
        for replica, rank in itertools.product(range(num_replicas), range(src_size))
    ]
    for dst_rank in range(dst_world):
        dst = layout(Shard(dst_rank, dst_world))
        routes = routes_to(dst, sources, dst_rank, dst_world)
        active = [src for src, route in zip(sources, routes, strict=True) if route.active]
        assert [src.replica for src in active] == [dst_rank % num_replicas] * src_size
        assert sum(route.active and route.sends_replicated for route in routes) == 1
        check_complete(routes, dst, WANTED, ((),) * 3)


def test_replicated_rows_come_from_each_source_in_turn() -> None:
    senders = []
    for dst_rank in range(6):
        routes = routes_to(layout(Shard(dst_rank, 6)), [layout(Shard(rank, 3)) for rank in range(3)], dst_rank, 6)
        senders += [route.src_shard.rank for route in routes if route.sends_replicated]
    assert senders == [0, 1, 2, 0, 1, 2]


def test_replicated_rows_come_from_each_shard_of_each_replica_in_turn() -> None:
    sources = [layout(Shard(rank, 2), replica=(replica, 2)) for replica, rank in itertools.product(range(2), repeat=2)]
    senders = []
    for dst_rank in range(4):
        routes = routes_to(layout(Shard(dst_rank, 4)), sources, dst_rank)
        senders += [idx for idx, route in enumerate(routes) if route.active and route.sends_replicated]
    assert senders == [0, 2, 1, 3]


@pytest.mark.parametrize("missing", range(4))
@pytest.mark.parametrize("dst_shard", [Shard(), Shard(2, 4), Shard(1, 3, 8)])
def test_a_missing_or_doubled_source(dst_shard: Shard, missing: int) -> None:
    dst = layout(dst_shard)
    sources = [
        layout(Shard(rank, 2, 2), stage=(stage_idx, 2)) for stage_idx, rank in itertools.product(range(2), range(2))
    ]
    check_complete(routes_to(dst, sources), dst, WANTED, ((),) * 3)
    stage_layers = f"layers \\[{missing // 2 * 2}, {missing // 2 * 2 + 2}\\)"
    with pytest.raises(PairingError, match=rf"group '\w+', {stage_layers}.*: got \d+ .*expected \d+"):
        check_complete(routes_to(dst, sources[:missing] + sources[missing + 1 :]), dst, WANTED, ((),) * 3)
    with pytest.raises(PairingError, match=rf"group '\w+', {stage_layers}.*: got \d+ .*expected \d+"):
        check_complete(routes_to(dst, [*sources, sources[missing]]), dst, WANTED, ((),) * 3)


def test_messages_name_got_and_expected() -> None:
    half = [layout(Shard(0, 2))]
    message = r"group 'kv', layers \[0, 4\): got 22 rows a layer from all sources, expected 45: token 5 comes from 0"
    with pytest.raises(PairingError, match=message):
        check_complete(routes_to(layout(Shard()), half), layout(Shard()), WANTED, ((),) * 3)
    draft_only = (TokenRange(0, 0), TokenRange(0, 50), TokenRange(0, 0))
    message = r"group 'draft', layers \[0, 4\): got 100 rows from all sources, expected 50 \(2 sources"
    with pytest.raises(PairingError, match=message):
        check_complete(routes_to(layout(Shard()), half * 2), layout(Shard()), draft_only, ((),) * 3)
    with pytest.raises(PairingError, match=r"got 44 rows .* expected 45: token 5 comes from 0 sources"):
        check_complete(routes_to(layout(Shard()), half * 2), layout(Shard()), WANTED, ((),) * 3)
    state_only = (TokenRange(0, 0), TokenRange(0, 0), TokenRange(0, 1))
    message = r"group 'state', layers \[0, 4\), state part 'ssm': got 60 bytes .* expected bytes \[0, 120\) exactly"
    with pytest.raises(PairingError, match=message):
        check_complete(routes_to(layout(Shard()), half), layout(Shard()), state_only, ((),) * 3)
    split_only = (GroupSpec("state", Placement.STATE, 4, parts=STATE.parts[1:]),)
    twice = [layout(Shard(0, 2), split_only)] * 2
    whole = layout(Shard(), split_only)
    with pytest.raises(PairingError, match=r"part 'ssm': got 120 bytes .* expected bytes \[0, 120\) exactly once"):
        check_complete(routes_to(whole, twice), whole, (TokenRange(0, 1),), ((),))


def test_sources_of_mixed_layouts() -> None:
    """Two DCP layouts at once cover some tokens twice and others never, even where the counts add up."""
    dst = layout(Shard(), (KV,))
    sources = [layout(Shard(0, 2, 1), (KV,)), layout(Shard(0, 2, 2), (KV,))]
    with pytest.raises(PairingError, match=r"got 4 rows .* expected 4: token 0 comes from 2 sources"):
        check_complete(routes_to(dst, sources), dst, (TokenRange(0, 4),), ((),))
    halves = [layout(Shard(0, 2, 2), (KV,)), layout(Shard(2, 4, 1), (KV,)), layout(Shard(3, 4, 1), (KV,))]
    check_complete(routes_to(dst, halves), dst, (TokenRange(0, 40),), ((),))


def test_nothing_wanted_needs_no_source() -> None:
    dst = layout(Shard())
    check_complete([], dst, (TokenRange(9, 9), TokenRange(0, 0), TokenRange(0, 0)), ((),) * 3)
    check_complete([], dst, WANTED, tuple((wanted,) for wanted in WANTED))
    with pytest.raises(PairingError, match=r"group 'kv', layers \[0, 4\): got 0 rows a layer"):
        check_complete([], dst, WANTED, ((),) * 3)


def test_subtract_against_sets() -> None:
    pairs = [TokenRange(first, end) for first, end in itertools.combinations_with_replacement(range(6), 2)]
    for whole, held, also_held in itertools.product(pairs, repeat=3):
        left = subtract(whole, (held, also_held))
        tokens = [token for each in left for token in range(each.first, each.end)]
        gone = {*range(held.first, held.end), *range(also_held.first, also_held.end)}
        assert tokens == [token for token in range(whole.first, whole.end) if token not in gone]
        assert all(each.num_tokens for each in left)
