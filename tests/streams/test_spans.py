"""Orders of a segment against the host packer: executed row by row they move the very same bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import LayoutError
from kvxfer.layout import Placement, Shard, StatePart, TokenRange
from kvxfer.rows_copy import copy_part
from kvxfer.rows_host import gather_segment, scatter_segment
from kvxfer.segments import BlockCut
from kvxfer.streams import chunk_orders
from kvxfer.streams.chunk_orders import ChunkOrders
from kvxfer.streams.ring import DST_COLUMN, LINEAR, MAX_SPANS, SPAN_WORDS, SRC_COLUMN, MemoryIndex, Span
from kvxfer.streams.spans import Order, PoolSide, SlotSide, pull_orders, segment_orders
from kvxfer.wire import BlockAddresses, ChunkPlan, match_layouts, plan_chunk, resolve
from tests.wire_world import Geometry, GroupSpec, Worker, make_layout, make_worker

PEER = 2
PARTS = (StatePart("conv", 36), StatePart("ssm", 9000, split=True))
SPECS = (
    GroupSpec("kv", Placement.SHARDED, 3, 24),
    GroupSpec("scales", Placement.SHARDED, 3, 7),
    GroupSpec("draft", Placement.REPLICATED, 1, 48),
    GroupSpec("state", Placement.STATE, 2, parts=PARTS),
)


def spans_of(order: Order) -> list[Span]:
    return [Span(*words[:9]) for words in np.array(order.span_words).reshape(-1, SPAN_WORDS).tolist()]


def in_slot(order: Order, column: int, slot_first_byte: int) -> Order:
    """As it is written into a lane for a slot that begins there."""
    words = np.array(order.span_words)
    words[column + 1 :: SPAN_WORDS] += slot_first_byte
    return Order(words.data, order.offsets)


def execute(order: Order, memories: dict[int, np.ndarray]) -> None:
    """Row by row, byte by byte as the words say."""
    assert len(spans_of(order)) <= MAX_SPANS
    for span in spans_of(order):
        for row in range(span.num_rows):
            places = []
            for first_byte, table in ((span.src_first_byte, span.src_table), (span.dst_first_byte, span.dst_table)):
                offset = row * span.row_bytes if table == LINEAR else int(order.offsets[table + row])
                places.append(first_byte + offset)
            src, dst = places
            assert src % span.word_bytes == dst % span.word_bytes == span.row_bytes % span.word_bytes == 0
            memories[span.dst_memory][dst : dst + span.row_bytes] = memories[span.src_memory][
                src : src + span.row_bytes
            ]


def widest_word(order: Order) -> bool:
    """Whether no span could have wider words."""
    for span in spans_of(order):
        numbers = [span.row_bytes]
        for first_byte, table in ((span.src_first_byte, span.src_table), (span.dst_first_byte, span.dst_table)):
            rows = range(span.num_rows)
            numbers += [first_byte + (int(order.offsets[table + i]) if table != LINEAR else 0) for i in rows]
        wider = span.word_bytes * 2
        if wider <= 16 and all(number % wider == 0 for number in numbers):
            return False
    return True


def both_sides(
    src_geometry: Geometry, dst_geometry: Geometry, dst_size: int, num_tokens: int, segment_bytes: int, seed: int
) -> tuple[ChunkPlan, Worker, tuple[BlockAddresses, ...], Worker, tuple[BlockAddresses, ...]]:
    """A random source pool, a poisoned destination, the plan of one leg and its addresses on both sides."""
    rng = random.Random(seed)
    src_layout = make_layout(SPECS, src_geometry, 80, Shard())
    dst_layout = make_layout(SPECS, dst_geometry, 80, Shard(seed % dst_size, dst_size))
    ranges = tuple(TokenRange(0, 1 if spec.placement is Placement.STATE else num_tokens) for spec in SPECS)
    src, dst = make_worker(src_layout, ranges, rng), make_worker(dst_layout, ranges, rng)
    src.pool[:] = np.random.default_rng(seed).integers(0, 256, src.pool.size)
    route = match_layouts(src_layout, dst_layout, seed % dst_size, dst_size)
    plan = plan_chunk(route, ranges, ranges, ((),) * len(ranges), None, segment_bytes)
    src_addresses = resolve(plan, route, "src", src_layout, tuple(src.table(i, r) for i, r in enumerate(ranges)))
    dst_addresses = resolve(plan, route, "dst", dst_layout, tuple(dst.table(i, r) for i, r in enumerate(ranges)))
    return plan, src, src_addresses, dst, dst_addresses


GEOMETRY = st.builds(
    Geometry,
    page_tokens=st.sampled_from([1, 4, 64]),
    order=st.sampled_from(["layer_major", "page_major"]),
    pad_bytes=st.sampled_from([0, 0, 1, 8]),
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    src_geometry=GEOMETRY,
    dst_geometry=GEOMETRY,
    dst_size=st.sampled_from([1, 3, 4]),
    num_tokens=st.sampled_from([1, 5, 40, 64]),
    segment_bytes=st.sampled_from([4096, 4500, 1 << 20]),
    max_offsets=st.sampled_from([1, 7, 50, 10_000]),
    slot=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_orders_move_what_the_host_packer_moves(
    src_geometry: Geometry,
    dst_geometry: Geometry,
    dst_size: int,
    num_tokens: int,
    segment_bytes: int,
    max_offsets: int,
    slot: int,
    seed: int,
) -> None:
    slot_first_byte = slot * segment_bytes
    plan, src, src_addresses, dst, dst_addresses = both_sides(
        src_geometry, dst_geometry, dst_size, num_tokens, segment_bytes, seed
    )
    packed, landed, pulled, before_segment = (dst.pool.copy() for _ in range(4))
    slots = np.full(slot_first_byte + segment_bytes + 16, 0x5A, dtype=np.uint8)
    slot_side = SlotSide(MemoryIndex.SLOTS, segment_bytes)
    src_side = PoolSide(MemoryIndex.POOL, src.pool.size, src_addresses)
    dst_side = PoolSide(MemoryIndex.POOL, dst.pool.size, dst_addresses)
    peer_side = PoolSide(PEER, src.pool.size, src_addresses)
    all_gathers = ChunkOrders(plan, src_side, slot_side, max_offsets, is_gather=True)
    all_scatters = ChunkOrders(plan, dst_side, slot_side, max_offsets, is_gather=False)
    for segment in range(plan.num_segments):
        expected = np.full_like(slots, 0x5A)
        num_bytes = gather_segment(src.pool, plan, src_addresses, segment, expected[slot_first_byte:])
        filled = expected[slot_first_byte : slot_first_byte + num_bytes]
        scatter_segment(packed, plan, dst_addresses, segment, filled)
        one_by_one = (
            segment_orders(plan, segment, src_side, slot_side, max_offsets),
            segment_orders(plan, segment, slot_side, dst_side, max_offsets),
        )
        # Pieces share a table: with odd gaps between rows, one of them may be aligned better than the table. And slots
        # that begin at odd places leave those of the first one narrower than they could be.
        if not src_geometry.pad_bytes and segment_bytes % 16 == 0:
            assert all(widest_word(order) for order in one_by_one[0])
        together = all_gathers.segment(segment), all_scatters.segment(segment)
        for gathers, scatters in (one_by_one, together):
            assert all(order.offsets.size <= max_offsets for order in gathers + scatters)
            slots[:] = 0x5A
            for order in gathers:
                there = in_slot(order, DST_COLUMN, slot_first_byte)
                execute(there, {MemoryIndex.POOL: src.pool, MemoryIndex.SLOTS: slots})
            np.testing.assert_array_equal(slots, expected)
            landed[:] = before_segment
            for order in scatters:
                there = in_slot(order, SRC_COLUMN, slot_first_byte)
                execute(there, {MemoryIndex.POOL: landed, MemoryIndex.SLOTS: slots})
            np.testing.assert_array_equal(landed, packed)
        pulled[:] = before_segment
        for order in segment_orders(plan, segment, peer_side, dst_side, max_offsets):
            assert order.offsets.size <= max_offsets
            execute(order, {MemoryIndex.POOL: pulled, PEER: src.pool})
        np.testing.assert_array_equal(pulled, packed)
        before_segment[:] = packed
    copied = dst.pool.copy()
    copy_part(src.pool, src_addresses, copied, dst_addresses, plan, 0, 1)
    np.testing.assert_array_equal(packed, copied)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    src_geometry=GEOMETRY,
    dst_geometry=GEOMETRY,
    dst_size=st.sampled_from([1, 3, 4]),
    num_tokens=st.sampled_from([1, 5, 40, 64]),
    max_offsets=st.sampled_from([1, 7, 50, 10_000]),
    seed=st.integers(0, 99),
)
def test_a_chunk_is_pulled_exactly(
    src_geometry: Geometry, dst_geometry: Geometry, dst_size: int, num_tokens: int, max_offsets: int, seed: int
) -> None:
    plan, src, src_addresses, dst, dst_addresses = both_sides(
        src_geometry, dst_geometry, dst_size, num_tokens, 4096, seed
    )
    expected, pulled = dst.pool.copy(), dst.pool.copy()
    copy_part(src.pool, src_addresses, expected, dst_addresses, plan, 0, 1)
    peer = PoolSide(PEER, src.pool.size, src_addresses)
    orders = pull_orders(plan, peer, PoolSide(MemoryIndex.POOL, dst.pool.size, dst_addresses), max_offsets)
    for order in orders:
        assert order.offsets.size <= max_offsets
        assert len(spans_of(order)) <= MAX_SPANS
        execute(order, {MemoryIndex.POOL: pulled, PEER: src.pool})
    np.testing.assert_array_equal(pulled, expected)


def test_a_chunk_of_many_rows_is_pulled_by_few_orders() -> None:
    """61 layers share two tables, so their number does not count."""
    plan = plan_of(8192, 1152, 61)
    scattered = list(range(0, 8192 * 2 * 1152, 2 * 1152))
    addresses = addresses_of(scattered, 1152, 1 << 25)
    side = PoolSide(MemoryIndex.POOL, 61 << 25, addresses)
    orders = pull_orders(plan, PoolSide(PEER, 61 << 25, addresses), side, 2 * 7281)
    assert [len(spans_of(order)) for order in orders] == [61, 61]
    assert [order.offsets.size for order in orders] == [8192, 8192]
    with pytest.raises(LayoutError, match="row offsets: got"):
        pull_orders(plan, PoolSide(PEER, 60 << 25, addresses), side, 2 * 7281)


def plan_of(num_tokens: int, row_bytes: int, num_layers: int) -> ChunkPlan:
    layout = make_layout((GroupSpec("kv", Placement.SHARDED, num_layers, row_bytes),), Geometry(4), 1000, Shard())
    ranges = (TokenRange(0, num_tokens),)
    return plan_chunk(match_layouts(layout, layout, 0, 1), ranges, ranges, ((),), None, 1 << 30)


def addresses_of(offsets: list[int], row_bytes: int, layer_stride_bytes: int) -> tuple[BlockAddresses, ...]:
    return (BlockAddresses(0, layer_stride_bytes, np.array(offsets, dtype=np.int64), row_bytes),)


def test_layers_share_one_table() -> None:
    plan = plan_of(3, 16, 5)
    side = PoolSide(MemoryIndex.POOL, 1 << 20, addresses_of([64, 0, 160], 16, 4096))
    (order,) = segment_orders(plan, 0, side, SlotSide(MemoryIndex.SLOTS, 1 << 20), 3)
    assert order.offsets.tolist() == [64, 0, 160]
    assert [span.src_first_byte for span in spans_of(order)] == [layer * 4096 for layer in range(5)]
    assert {span.word_bytes for span in spans_of(order)} == {16}


def test_rows_that_touch_need_no_table() -> None:
    """A state blob of many rows, say."""
    plan = plan_of(500, 4, 2)
    side = PoolSide(MemoryIndex.POOL, 1 << 20, addresses_of(list(range(8, 2008, 4)), 4, 4096))
    (order,) = segment_orders(plan, 0, side, SlotSide(MemoryIndex.SLOTS, 1 << 20), 1)
    assert order.offsets.size == 0
    assert [(span.src_first_byte, span.src_table) for span in spans_of(order)] == [(8, LINEAR), (4104, LINEAR)]


def test_more_layers_than_spans_are_folded() -> None:
    plan = plan_of(2, 8, MAX_SPANS + 1)
    side = PoolSide(MemoryIndex.POOL, 1 << 20, addresses_of([0, 80], 8, 4096))
    slot_side = SlotSide(MemoryIndex.SLOTS, 1 << 20)
    (order,) = segment_orders(plan, 0, side, slot_side, 1000)
    assert [span.num_rows for span in spans_of(order)] == [2 * (MAX_SPANS + 1)]
    assert len(segment_orders(plan, 0, side, slot_side, 100)) == 2


@pytest.mark.parametrize("bad_offset", [-16, 4096 - 8, 1 << 62])
@pytest.mark.parametrize("num_layers", [1, MAX_SPANS + 1])
def test_rows_outside_the_pool_are_refused(bad_offset: int, num_layers: int) -> None:
    plan = plan_of(2, 16, num_layers)
    slot_side = SlotSide(MemoryIndex.SLOTS, 1 << 20)
    fits = PoolSide(MemoryIndex.POOL, 4096, addresses_of([0, 4096 - 16], 16, 0))
    assert segment_orders(plan, 0, fits, slot_side, 1000)
    side = PoolSide(MemoryIndex.POOL, 4096, addresses_of([0, bad_offset], 16, 0))
    with pytest.raises(LayoutError, match="expected 0 to 4080: rows of 16 bytes in a pool of 4096 bytes"):
        segment_orders(plan, 0, side, slot_side, 1000)
    with pytest.raises(LayoutError, match="expected 0 to 4080"):
        segment_orders(plan, 0, slot_side, side, 1000)


@pytest.mark.parametrize("num_layers", [1, MAX_SPANS + 1])
def test_a_segment_larger_than_its_slot_is_refused(num_layers: int) -> None:
    plan = plan_of(2, 16, num_layers)
    side = PoolSide(MemoryIndex.POOL, 1 << 20, addresses_of([0, 160], 16, 256))
    too_small = SlotSide(MemoryIndex.SLOTS, 32 * num_layers - 1)
    with pytest.raises(LayoutError, match=f"expected at least {32 * num_layers} for the segment"):
        segment_orders(plan, 0, side, too_small, 1000)


@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_layers"), [(40, 6), (100, 5), (1000, 2), (13, 20), (70, 1)])
def test_segments_of_one_block_are_worked_out_together(
    num_tokens: int, num_layers: int, is_gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is left to be cut one by one, wherever layers begin in it; what a chunk shares with the one before
    it, of the same shape, stays as it was."""
    layout = make_layout((GroupSpec("kv", Placement.SHARDED, num_layers, 16),), Geometry(4), 1000, Shard())
    ranges = (TokenRange(0, num_tokens),)
    plan = plan_chunk(match_layouts(layout, layout, 0, 1), ranges, ranges, ((),), None, 70 * 16)
    monkeypatch.setattr(chunk_orders, "segment_orders", None)
    rng = np.random.default_rng(num_tokens)
    half_linear = rng.permutation(num_tokens)
    half_linear[: num_tokens // 2] = np.arange(num_tokens // 2) + num_tokens
    for rows in (rng.permutation(num_tokens), np.arange(num_tokens), half_linear, rng.permutation(num_tokens)):
        side = PoolSide(MemoryIndex.POOL, 1 << 20, (BlockAddresses(64, num_tokens * 32, rows * 16, 16),))
        orders = ChunkOrders(plan, side, SlotSide(MemoryIndex.SLOTS, 70 * 16), 70, is_gather=is_gather)
        pool, slots = (rng.integers(0, 256, size, dtype=np.uint8) for size in (1 << 20, 3 * 70 * 16))
        for segment in range(plan.num_segments):
            expected_pool, expected_slots = pool.copy(), slots.copy()
            if is_gather:
                gather_segment(pool, plan, side.addresses, segment, expected_slots[70 * 16 :])
            else:
                scatter_segment(expected_pool, plan, side.addresses, segment, slots[70 * 16 : 140 * 16])
            (order,) = orders.segment(segment)
            assert order.offsets.size <= min(num_tokens, 70)
            assert {span.word_bytes for span in spans_of(order)} == {16}
            there = in_slot(order, DST_COLUMN if is_gather else SRC_COLUMN, 70 * 16)
            execute(there, {MemoryIndex.POOL: pool, MemoryIndex.SLOTS: slots})
            np.testing.assert_array_equal(pool, expected_pool)
            np.testing.assert_array_equal(slots, expected_slots)


def test_rows_that_touch_leave_their_segments_without_a_table() -> None:
    plan = plan_of(200, 16, 2)
    side = PoolSide(MemoryIndex.POOL, 1 << 20, addresses_of(list(range(8, 8 + 200 * 16, 16)), 16, 4096))
    orders = ChunkOrders(plan, side, SlotSide(MemoryIndex.SLOTS, 1 << 30), 1, is_gather=True)
    (order,) = orders.segment(0)
    assert order.offsets.size == 0
    assert [(span.src_first_byte, span.src_table) for span in spans_of(order)] == [(8, LINEAR), (4104, LINEAR)]


def test_a_row_outside_the_pool_is_named_by_the_segment_that_has_it() -> None:
    plan = plan_of(300, 16, 1)
    rows = np.arange(300) * 32
    rows[299] = 1 << 20
    side = PoolSide(MemoryIndex.POOL, 1 << 20, (BlockAddresses(0, 0, rows, 16),))
    small = ChunkPlan(plan.blocks, (BlockCut(0, 3, 100, 100, 0, 0),), plan.num_bytes, plan.num_rows, 3)
    orders = ChunkOrders(small, side, SlotSide(MemoryIndex.SLOTS, 1600), 1000, is_gather=False)
    assert len(orders.segment(0)) == 1
    with pytest.raises(LayoutError, match="row offsets: got"):
        orders.segment(2)
