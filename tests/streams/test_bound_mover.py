"""Orders to entries that are bound to slots: each slot gets its own segment, and keeps it until it gets another."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.operations import CancelFlag, RowSum, SegmentSource
from kvxfer.row_sums import row_sum
from kvxfer.rows_host import gather_segment
from kvxfer.streams.entries import Entries
from kvxfer.streams.ring import OrderCode, Ring
from kvxfer.streams.slot_binding import bind_entries, offer_slots
from tests.streams.owner import NUM_SLOTS, SLOT_BYTES, Owner, chunk_of


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner(is_bound=True) as found:
        yield found


@pytest.fixture
def slow() -> Iterator[Owner]:
    """One that enqueues when told to."""
    with Owner(is_bound=True, is_eager=False) as found:
        yield found


def packed(owner: Owner, source: SegmentSource, segment: int = 0) -> np.ndarray:
    slot = np.zeros(SLOT_BYTES, dtype=np.uint8)
    gather_segment(owner.pool.array, source.plan, source.addresses, segment, slot)
    first_byte, end_byte = source.plan.segment_range(segment)
    return slot[: end_byte - first_byte]


def assert_packed(owner: Owner, slot: int, source: SegmentSource, segment: int = 0) -> None:
    expected = packed(owner, source, segment)
    np.testing.assert_array_equal(owner.slot(slot)[: len(expected)], expected)


def test_gathers_in_turn_waste_no_entry(owner: Owner) -> None:
    assert owner.mover.fills_in_turn
    source = chunk_of(160)
    num_segments = source.plan.num_segments
    owner.mover.expect(num_segments, 0)
    for segment in range(num_segments):
        owner.mover.gather(owner.move(segment, source, segment), segment % NUM_SLOTS, None)
        owner.mover.expect(num_segments - segment - 1, 0)
        (moved,) = owner.wait(1)
        assert (moved.operation, moved.error) == (segment, None)
        assert_packed(owner, segment % NUM_SLOTS, source, segment)
    assert owner.num_enqueued == num_segments
    owner.wait_until_drained()


def test_slots_in_any_order_get_their_own_segments_and_all_others_keep_theirs(owner: Owner) -> None:
    source = chunk_of(16 * 40)
    rng, holds = random.Random(3), dict[int, int]()
    for segment in range(40):
        slot = rng.randrange(NUM_SLOTS)
        owner.mover.expect(1, 0)
        owner.mover.gather(owner.move(segment, source, segment), slot, None)
        owner.mover.expect(0, 0)
        owner.wait(1)
        holds[slot] = segment
        for other, held in holds.items():
            assert_packed(owner, other, source, held)
    assert owner.num_enqueued > 40
    owner.wait_until_drained()


def test_many_at_once_in_any_order(owner: Owner) -> None:
    source = chunk_of(16 * 4)
    for round_idx, order in enumerate(((3, 1, 0, 2), (0, 1, 2, 3), (2, 3, 1, 0))):
        owner.mover.expect(4, 0)
        for slot in order:
            owner.mover.gather(owner.move(4 * round_idx + slot, source, slot), slot, None)
        owner.mover.expect(0, 0)
        owner.wait(4)
        for slot in range(4):
            assert_packed(owner, slot, source, slot)
    owner.wait_until_drained()


def test_entries_that_turn_out_not_to_be_needed_harm_no_slot(slow: Owner) -> None:
    source = chunk_of(16 * 4)
    slow.mover.expect(4, 0)
    for slot in range(4):
        slow.mover.gather(slow.move(slot, source, slot), slot, None)
    slow.mover.expect(0, 0)
    slow.feed()
    slow.wait(4)
    slow.mover.expect(6, 0)
    slow.feed()
    slow.mover.expect(0, 0)
    slow.wait_until_drained()
    assert slow.num_enqueued == 10
    for slot in range(4):
        assert_packed(slow, slot, source, slot)


def test_a_cancelled_gather_takes_only_its_own_slot_with_it(slow: Owner) -> None:
    source, flag = chunk_of(16 * 4), CancelFlag()
    slow.mover.expect(4, 0)
    for slot in range(4):
        slow.mover.gather(slow.move(slot, source, slot, flag if slot == 1 else None), slot, None)
    flag.is_set = True
    slow.mover.expect(0, 0)
    slow.feed()
    ended = {moved.operation: moved.was_begun for moved in slow.wait(4)}
    assert ended == {0: True, 1: False, 2: True, 3: True}
    slow.wait_until_drained()
    for slot in (0, 2, 3):
        assert_packed(slow, slot, source, slot)


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_segment_of_several_orders(is_summed: bool) -> None:
    """Lanes with room for few offsets: each order keeps what those before it have put into the slot."""
    with Owner(is_bound=True) as owner:
        owner.agent_ring.max_offsets = 5
        source = chunk_of(16 * 3)
        for segment, slot in enumerate((0, 2, 1)):
            found: list[int] = []
            row_sum_of = RowSum(found.append, SLOT_BYTES) if is_summed else None
            owner.mover.expect(1, 0)
            owner.mover.gather(owner.move(segment, source, segment, row_sum=row_sum_of), slot, None)
            owner.mover.expect(0, 0)
            (moved,) = owner.wait(1)
            assert moved.error is None
            assert found == ([row_sum(packed(owner, source, segment))] if is_summed else [])
        for segment, slot in enumerate((0, 2, 1)):
            assert_packed(owner, slot, source, segment)
        assert owner.num_enqueued > 3 * NUM_SLOTS
        owner.wait_until_drained()


def test_slots_that_have_moved_are_not_filled_by_entries_from_before(slow: Owner) -> None:
    source = chunk_of(16)
    slow.mover.hold(True)
    slow.mover.expect(1, 0)
    slow.mover.gather(slow.move(0, source), 0, None)
    slow.mover.expect(0, 0)
    slow.feed()
    assert slow.num_enqueued == 1
    slow.mover.hold(False)
    assert slow.agent_ring.order_of(0) is OrderCode.SKIP
    slow.is_eager = True
    slow.feed()
    slow.wait(1)
    assert_packed(slow, 0, source)
    slow.wait_until_drained()


def test_a_stream_that_is_left_with_entries_may_still_write_slots(slow: Owner) -> None:
    slow.mover.expect(2, 0)
    slow.feed()
    slow.mover.stop("the worker is gone")
    assert slow.mover.may_still_move
    slow.poll()


@pytest.mark.parametrize("is_bound", [False, True])
def test_an_owner_that_ends_may_have_spoilt_the_slots_that_its_entries_are_bound_to(is_bound: bool) -> None:
    with Owner(is_bound=is_bound, is_eager=False) as owner:
        source = chunk_of(16 * 2)
        for slot in range(2):
            owner.mover.gather(owner.move(slot, source, slot), slot, None)
        owner.mover.expect(NUM_SLOTS, 0)  # which are enqueued as well, one of them for slot 0
        owner.feed()
        owner.wait(2)
        assert_packed(owner, 0, source, 0)
        assert not owner.mover.may_have_spoilt
        owner.agent_ring.set_ended()
        assert owner.mover.may_have_spoilt == is_bound
        held = owner.slot(0).copy()
        for number in range(2, owner.num_enqueued):
            owner.agent_ring.order(number, OrderCode.SKIP)
        owner.wait_until_drained()
        assert np.array_equal(owner.slot(0), held) is not is_bound


def test_entries_in_surplus_wait_while_the_slots_move(slow: Owner) -> None:
    slow.mover.expect(2, 0)
    slow.feed()
    slow.mover.hold(True)
    slow.mover.expect(0, 0)
    assert [slow.agent_ring.order_of(number) for number in range(2)] == [None, None]
    slow.mover.hold(False)
    assert [slow.agent_ring.order_of(number) for number in range(2)] == [OrderCode.SKIP, OrderCode.SKIP]
    slow.wait_until_drained()


def test_that_entries_are_bound_is_seen_also_by_who_asked_too_early() -> None:
    ring = Ring.create(1, 1)
    offer_slots(ring, NUM_SLOTS, SLOT_BYTES)
    entries = Entries(ring)
    assert entries.bound is None
    bound = bind_entries(ring, NUM_SLOTS * SLOT_BYTES)
    assert bound is not None
    assert entries.bound == bound
    ring.close()
