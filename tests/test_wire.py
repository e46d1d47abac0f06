"""Whole transfers against a naive loop over tokens: every destination byte is right, and no other byte is touched."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ContractError, LayoutError
from kvxfer.layout import LayerRange, Placement, Shard, StatePart, TokenRange
from kvxfer.rows_host import gather_segment, scatter_segment
from kvxfer.wire import (
    ChunkPlan,
    Route,
    check_complete,
    check_pages,
    count_runs,
    match_layouts,
    plan_chunk,
    resolve,
    runs,
)
from tests.wire_world import POISON, Geometry, GroupSpec, Worker, fill, make_layout, make_worker

NOTHING = TokenRange(0, 0)
PARTS = (StatePart("conv", 60), StatePart("ssm", 840 * 11, split=True), StatePart("tail", 1))
KV = GroupSpec("kv", Placement.SHARDED, 3, 13)
DRAFT = GroupSpec("draft", Placement.REPLICATED, 2, 7)
STATE = GroupSpec("state", Placement.STATE, 2, parts=PARTS)


@dataclass(frozen=True, slots=True)
class Submit:
    """One chunk: tokens for each of the destination's groups, and layers."""

    ranges: tuple[TokenRange, ...]
    layers: LayerRange | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one destination opened and how the sources cut it into chunks."""

    wanted: tuple[TokenRange, ...]
    have: tuple[tuple[TokenRange, ...], ...]
    submits: tuple[Submit, ...]
    segment_bytes: int


def move(src: Worker, src_pool: np.ndarray, dst: Worker, route: Route, transfer: Transfer) -> int:
    """Gather and scatter all that one source owes; returns the bytes moved."""
    num_moved_bytes = 0
    dst_tables = tuple(dst.table(group.dst_idx, transfer.wanted[group.dst_idx]) for group in route.groups)
    for submit in transfer.submits:
        plan = plan_chunk(route, submit.ranges, transfer.wanted, transfer.have, submit.layers, transfer.segment_bytes)
        src_tables = tuple(src.table(group.src_idx, submit.ranges[group.dst_idx]) for group in route.groups)
        for layout, tables, side in ((src.layout, src_tables, "src"), (dst.layout, dst_tables, "dst")):
            for group, table in zip(route.groups, tables, strict=True):
                idx = group.src_idx if side == "src" else group.dst_idx
                check_pages(layout.groups[idx], layout.shard, table.token_range, table.pages)
        src_addresses = resolve(plan, route, "src", src.layout, src_tables)
        dst_addresses = resolve(plan, route, "dst", dst.layout, dst_tables)
        num_runs = 0
        for segment_idx in range(plan.num_segments):
            slot = np.full(transfer.segment_bytes + 8, 0x11, dtype=np.uint8)
            num_bytes = gather_segment(src_pool, plan, src_addresses, segment_idx, slot)
            raw_slot = np.full_like(slot, 0x11)
            for piece in plan.pieces(segment_idx):
                of_piece = runs(src_addresses[piece.block_idx], piece, plan.blocks[piece.block_idx])
                num_runs += of_piece[0].size
                for src_offset, slot_offset, length in zip(*of_piece, strict=True):
                    raw_slot[slot_offset : slot_offset + length] = src_pool[src_offset : src_offset + length]
            np.testing.assert_array_equal(slot, raw_slot)
            assert (slot[num_bytes:] == 0x11).all()
            assert scatter_segment(dst.pool, plan, dst_addresses, segment_idx, slot) == num_bytes
        assert count_runs(plan, src_addresses) == num_runs
        check_segments(plan, transfer.segment_bytes)
        num_moved_bytes += plan.num_bytes
    return num_moved_bytes


def check_segments(plan: ChunkPlan, segment_bytes: int) -> None:
    """Segments follow each other, none is larger than a slot, and none could have taken one row more."""
    end_byte = num_rows = 0
    for segment_idx in range(plan.num_segments):
        first_byte, new_end_byte = plan.segment_range(segment_idx)
        assert first_byte == end_byte
        end_byte = new_end_byte
        slot_offset_bytes = 0
        for piece in plan.pieces(segment_idx):
            assert piece.slot_offset_bytes == slot_offset_bytes
            assert piece.end_row > piece.first_row
            num_rows += piece.end_row - piece.first_row
            slot_offset_bytes += (piece.end_row - piece.first_row) * plan.blocks[piece.block_idx].row_bytes
        assert slot_offset_bytes == end_byte - first_byte <= segment_bytes
        if segment_idx + 1 < plan.num_segments:
            next_piece = plan.pieces(segment_idx + 1)[0]
            assert slot_offset_bytes + plan.blocks[next_piece.block_idx].row_bytes > segment_bytes
    assert (end_byte, num_rows) == (plan.num_bytes, plan.num_rows)


def run(sources: list[Worker], dests: list[Worker], transfer: Transfer) -> None:
    src_pools = [fill(src)[0] for src in sources]
    for dst_rank, dst in enumerate(dests):
        expected, num_owed_bytes = fill(dst, transfer.have)
        routes = [match_layouts(src.layout, dst.layout, dst_rank, len(dests)) for src in sources]
        check_complete(routes, dst.layout, transfer.wanted, transfer.have)
        legs = zip(sources, src_pools, routes, strict=True)
        num_moved_bytes = sum(move(src, src_pool, dst, route, transfer) for src, src_pool, route in legs)
        assert num_moved_bytes == num_owed_bytes  # once each: a row that came twice would look right, too
        np.testing.assert_array_equal(dst.pool, expected)
    for src in sources:
        assert (src.pool == POISON).all()


def one_group_world(
    src: tuple[int, int, int], dst: tuple[int, int, int], first: int, num_tokens: int
) -> tuple[list[Worker], list[Worker]]:
    """Workers for the group KV; sides are (DCP size, interleave, page tokens)."""
    rng = random.Random(1)
    sides = []
    for (size, interleave, page_tokens), first_held in ((src, 0), (dst, first)):
        num_pages = (first + num_tokens) // page_tokens + 2
        layouts = [
            make_layout((KV,), Geometry(page_tokens), num_pages, Shard(rank, size, interleave)) for rank in range(size)
        ]
        sides.append([make_worker(each, (TokenRange(first_held, first + num_tokens),), rng) for each in layouts])
    return sides[0], sides[1]


@pytest.mark.parametrize(("src_size", "dst_size"), list(itertools.product([1, 3, 8], repeat=2)))
def test_every_pairing_of_sizes_interleaves_and_pages(src_size: int, dst_size: int) -> None:
    pairings = itertools.product([1, 3, 16], [1, 3, 16], [1, 16, 64], [1, 16, 64])
    # 8 lengths and 5 firsts against 81 pairings: never in step, so each meets each.
    lengths = itertools.cycle([0, 1, 15, 16, 17, 63, 64, 65])
    firsts = itertools.cycle([0, 5, 64, 31, 7])
    for src_interleave, dst_interleave, src_page, dst_page in pairings:
        first, num_tokens = next(firsts), next(lengths)
        sources, dests = one_group_world(
            (src_size, src_interleave, src_page), (dst_size, dst_interleave, dst_page), first, num_tokens
        )
        wanted = (TokenRange(first, first + num_tokens),)
        run(sources, dests, Transfer(wanted, ((),), (Submit(wanted, None),), 500))


@pytest.mark.parametrize("dst", [(8, 1, 16), (3, 64, 64), (2, 16, 64), (1, 1, 1)])
@pytest.mark.parametrize("src", [(1, 1, 64), (2, 64, 64), (4, 3, 16)])
def test_a_thousand_tokens(src: tuple[int, int, int], dst: tuple[int, int, int]) -> None:
    sources, dests = one_group_world(src, dst, 77, 1000)
    wanted = (TokenRange(77, 1077),)
    submits = tuple(Submit((TokenRange(first, min(first + 300, 1077)),), None) for first in range(0, 1077, 300))
    run(sources, dests, Transfer(wanted, ((),), submits, 4096))


@st.composite
def submits_of(draw: st.DrawFn, specs: tuple[GroupSpec, ...], end: int, rng: random.Random) -> tuple[Submit, ...]:
    """Chunks of tokens and layers that cover tokens `[0, end)`, in any order; state comes with the last tokens."""
    cuts = sorted({0, end, *rng.choices(range(end + 1), k=draw(st.integers(0, 3)))})
    chunks = [TokenRange(*pair) for pair in itertools.pairwise(cuts)] or [NOTHING]
    layer_cuts = draw(st.sampled_from([None, (0, 2, 3), (0, 1, 9)]))
    submits = []
    for chunk, layers in itertools.product(chunks, [None] if layer_cuts is None else itertools.pairwise(layer_cuts)):
        is_last = chunk.end == end
        ranges = tuple(
            (TokenRange(0, 1) if is_last and end else NOTHING) if spec.placement is Placement.STATE else chunk
            for spec in specs
        )
        submits.append(Submit(ranges, None if layers is None else LayerRange(*layers)))
    rng.shuffle(submits)
    return tuple(submits)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[Worker], list[Worker], Transfer]:
    """Any number of stages, replicas and shards, any layouts, prefixes, chunks and rows already held."""
    rng = random.Random(draw(st.integers(0, 1000)))
    specs = draw(st.sampled_from([(KV,), (KV, DRAFT), (KV, STATE), (STATE, DRAFT, KV)]))
    first, num_tokens = draw(st.integers(0, 20)), draw(st.sampled_from([0, 1, 3, 4, 5, 33, 60]))
    end = first + num_tokens
    num_stages, num_replicas = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    src_size, dst_size, num_copies = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    src_interleave, dst_interleave = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([1, 3, 4]))

    def geometry() -> Geometry:
        page_tokens, pad_bytes = draw(st.sampled_from([1, 4, 7])), draw(st.sampled_from([0, 5]))
        return Geometry(page_tokens, "page_major" if draw(st.booleans()) else "layer_major", pad_bytes)

    def ranges_of(token_range: TokenRange) -> tuple[TokenRange, ...]:
        has_state = TokenRange(0, 1 if token_range.end else 0)
        return tuple(has_state if spec.placement is Placement.STATE else token_range for spec in specs)

    src_geometry, dst_geometry = geometry(), geometry()
    sources = []
    for stage_idx, replica, rank in itertools.product(range(num_stages), range(num_replicas), range(src_size)):
        layout = make_layout(
            specs[::-1],  # groups meet by name, not by place
            src_geometry,
            end + 2,
            Shard(rank, src_size, src_interleave),
            stage=(stage_idx, num_stages),
            replica=(replica, num_replicas),
        )
        sources.append(make_worker(layout, ranges_of(TokenRange(0, end))[::-1], rng))
    wanted = ranges_of(TokenRange(first, end))
    dests = [
        make_worker(
            make_layout(specs, dst_geometry, end + 2, Shard(agent % dst_size, dst_size, dst_interleave)), wanted, rng
        )
        for agent in range(dst_size * num_copies)
    ]
    have_ranges = []
    for spec in specs:
        held = sorted(rng.choices(range(end + 1), k=2)) if rng.random() < 0.5 else [0, 0]
        is_state = spec.placement is Placement.STATE
        have_ranges.append(() if is_state else (TokenRange(*held), TokenRange(held[0], held[0] + 1)))
    submits = draw(submits_of(specs, end, rng))
    transfer = Transfer(wanted, tuple(have_ranges), submits, draw(st.sampled_from([4096, 9999, 20000])))
    return sources, dests, transfer


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(transfers())
def test_whole_transfers(world: tuple[list[Worker], list[Worker], Transfer]) -> None:
    run(*world)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(6, 60),
)
def test_segments_of_any_blocks(groups: list[tuple[int, int, int]], segment_bytes: int) -> None:
    specs = tuple(
        GroupSpec(f"g{idx}", Placement.REPLICATED, num_layers, row_bytes)
        for idx, (num_layers, row_bytes, _) in enumerate(groups)
    )
    layout = make_layout(specs, Geometry(4), 50, Shard())
    ranges = tuple(TokenRange(0, num_tokens) for _, _, num_tokens in groups)
    route = match_layouts(layout, layout, 0, 1)
    plan = plan_chunk(route, ranges, ranges, ((),) * len(groups), None, segment_bytes)
    check_segments(plan, segment_bytes)
    assert plan.num_rows == sum(num_layers * num_tokens for num_layers, _, num_tokens in groups)


def test_wire_order_is_group_layer_token() -> None:
    layout = make_layout((KV, DRAFT), Geometry(4), 50, Shard())
    route = match_layouts(layout, layout, 0, 1)
    ranges = (TokenRange(3, 5), TokenRange(8, 10))
    plan = plan_chunk(route, ranges, ranges, ((), ()), None, 1 << 20)
    order = [
        (route.groups[plan.blocks[piece.block_idx].group_idx].name, piece.layer, int(token))
        for piece in plan.pieces(0)
        for token in plan.blocks[piece.block_idx].tokens[piece.first_row : piece.end_row]
    ]
    kv_rows = [("kv", layer, token) for layer in range(3) for token in (3, 4)]
    assert order == kv_rows + [("draft", layer, token) for layer in range(2) for token in (8, 9)]


def test_zero_rows_are_a_plan() -> None:
    layout = make_layout((KV, DRAFT, STATE), Geometry(4), 50, Shard())
    route = match_layouts(layout, layout, 0, 1)
    plan = plan_chunk(route, (NOTHING,) * 3, (NOTHING,) * 3, ((),) * 3, None, 1)
    assert (plan.blocks, plan.num_bytes, plan.num_rows, plan.num_segments) == ((), 0, 0, 0)
    assert resolve(plan, route, "src", layout, ()) == ()
    assert count_runs(plan, ()) == 0
    with pytest.raises(ContractError, match=r"segment_idx: got 0, expected below num_segments 0"):
        plan.pieces(0)


def test_a_row_larger_than_a_segment_is_refused() -> None:
    layout = make_layout((KV,), Geometry(4), 50, Shard())
    ranges = (TokenRange(0, 5),)
    with pytest.raises(LayoutError, match=r"segment_bytes: got 12, expected at least a row of 13 bytes"):
        plan_chunk(match_layouts(layout, layout, 0, 1), ranges, ranges, ((),), None, 12)


def test_touching_rows_become_one_run() -> None:
    layout = make_layout((KV,), Geometry(4), 50, Shard())
    route = match_layouts(layout, layout, 0, 1)
    whole = (TokenRange(0, 16),)
    worker = make_worker(layout, whole, random.Random(0))
    # Pages 3 and 4 touch, pages 9 and 1 do not: three runs a layer, in three layers.
    worker.pages[0][:] = [3, 4, 9, 1]
    plan = plan_chunk(route, whole, whole, ((),), None, 1 << 20)
    addresses = resolve(plan, route, "src", layout, (worker.table(0, whole[0]),))
    assert count_runs(plan, addresses) == 9
    src_offsets, slot_offsets, lengths = runs(addresses[0], plan.pieces(0)[1], plan.blocks[0])
    assert lengths.tolist() == [8 * 13, 4 * 13, 4 * 13]
    assert (slot_offsets - slot_offsets[0]).tolist() == [0, 8 * 13, 12 * 13]
    group = layout.groups[0]
    first_offset = group.base_offset_bytes + group.layer_stride_bytes
    assert src_offsets.tolist() == [first_offset + page * group.page_stride_bytes for page in (3, 9, 1)]
