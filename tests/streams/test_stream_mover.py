"""Orders to a stream: given late and in order, skipped where they are not needed, ended once whatever happens."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvxfer.errors import HandoffError, IntegrityError
from kvxfer.operations import CancelFlag, PeerRows, RowSum, SegmentSource
from kvxfer.row_sums import row_sum
from kvxfer.rows_host import gather_segment
from kvxfer.streams.ring import OrderCode
from kvxfer.wire import BlockAddresses
from tests.streams.owner import NUM_SLOTS, POOL_BYTES, ROW_BYTES, SLOT_BYTES, Owner, chunk_of


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner() as found:
        yield found


@pytest.fixture
def slow() -> Iterator[Owner]:
    """One that enqueues when told to."""
    with Owner(is_eager=False) as found:
        yield found


def packed(owner: Owner, source: SegmentSource, segment: int = 0) -> np.ndarray:
    slot = np.zeros(SLOT_BYTES, dtype=np.uint8)
    gather_segment(owner.pool.array, source.plan, source.addresses, segment, slot)
    return slot


def test_gathers_and_scatters_are_exact(owner: Owner) -> None:
    source, target = chunk_of(40), chunk_of(40, first_page=101)
    assert source.plan.num_segments == 3
    owner.mover.expect(3, 0)
    for segment in range(3):
        owner.mover.gather(owner.move(segment, source, segment), segment, None)
    moved = owner.wait(3)
    assert [(each.operation, each.error, each.was_begun) for each in moved] == [(i, None, True) for i in range(3)]
    for segment in range(3):
        np.testing.assert_array_equal(owner.slot(segment), packed(owner, source, segment))
    owner.mover.expect(3, 0)
    for segment in range(3):
        owner.mover.scatter(owner.move(10 + segment, target, segment), segment, None)
    owner.wait(3)
    for segment in range(3):
        np.testing.assert_array_equal(packed(owner, target, segment), owner.slot(segment))
    assert owner.num_enqueued == 6


@pytest.mark.parametrize("is_prepared", [False, True])
def test_rows_are_pulled_from_another_memory_and_then_their_lease_is_looked_at(owner: Owner, is_prepared: bool) -> None:
    target = chunk_of(10, first_page=101)
    owner.stream.set_memory(2, owner.slots)
    row_offsets = np.arange(10, dtype=np.int64)[::-1].copy() * ROW_BYTES
    owner.slots.array[:] = np.random.default_rng(1).integers(0, 256, owner.slots.num_bytes)
    expected = owner.slots.array[: 10 * ROW_BYTES].reshape(10, ROW_BYTES)[::-1].ravel()
    src = PeerRows(2, owner.slots.num_bytes, (BlockAddresses(0, 0, row_offsets, ROW_BYTES),))

    def look() -> None:
        np.testing.assert_array_equal(packed(owner, target)[: 10 * ROW_BYTES], expected)
        raise HandoffError("the lease is void")

    owner.mover.expect(1, 0)
    if is_prepared:
        owner.mover.prepare_pull(target, src)
        owner.mover.expect(1, 0)
        assert owner.num_enqueued == 1
        assert packed(owner, target)[: 10 * ROW_BYTES].tolist() != expected.tolist()
    owner.mover.pull(owner.move(1, target), src, look)
    (moved,) = owner.wait(1)
    assert moved.error == "segment 0: HandoffError: the lease is void"
    owner.mover.pull(owner.move(2, target), src, lambda: "it holds")
    owner.mover.expect(0, 0)
    assert [each.error for each in owner.wait(1)] == [None]


def test_a_pull_from_outside_the_peers_memory_fails_when_it_is_given(owner: Owner) -> None:
    target = chunk_of(4)
    outside = PeerRows(2, 48, (BlockAddresses(0, 0, np.arange(4, dtype=np.int64) * ROW_BYTES, ROW_BYTES),))
    owner.mover.prepare_pull(target, outside)
    assert owner.poll() == []
    owner.mover.pull(owner.move(1, target), outside, lambda: None)
    assert "row offsets" in str(owner.wait(1)[0].error)


def test_a_segment_larger_than_a_lane_takes_several_entries() -> None:
    with Owner(num_lanes=1, max_offsets=1) as owner:
        room = owner.agent_ring.max_offsets  # a lane is rounded up to pages
        source = chunk_of(16)
        many = SegmentSource(
            source.plan,
            (BlockAddresses(0, 0, np.arange(16, dtype=np.int64) * 2 * ROW_BYTES, ROW_BYTES),),
        )
        owner.agent_ring.max_offsets = 5
        assert room > 5
        owner.mover.gather(owner.move(1, many), 0, None)
        owner.mover.expect(0, 0)
        assert [each.error for each in owner.wait(1)] == [None]
        assert owner.num_enqueued > 1
        np.testing.assert_array_equal(owner.slot(0), packed(owner, many))


def test_rows_outside_the_pool_end_the_move_alone(owner: Owner) -> None:
    outside = SegmentSource(chunk_of(4).plan, (BlockAddresses(POOL_BYTES - 48, 0, np.arange(4) * 16, ROW_BYTES),))
    owner.mover.expect(2, 0)
    owner.mover.gather(owner.move(1, outside), 0, None)
    owner.mover.gather(owner.move(2, chunk_of(4)), 1, None)
    ends = {each.operation: each.error for each in owner.wait(2)}
    assert ends[2] is None
    assert "row offsets" in str(ends[1])
    owner.mover.expect(0, 0)
    owner.wait_until_drained()


# ---- entries ----


def test_entries_are_asked_for_before_their_moves_come(slow: Owner) -> None:
    slow.mover.expect(5, 0)
    assert slow.num_wanted == 5
    slow.mover.gather(slow.move(1, chunk_of(4)), 0, None)
    slow.mover.expect(4, 0)
    assert slow.num_wanted == 5
    assert slow.poll() == []
    slow.feed()
    slow.wait(1)


def test_surplus_is_skipped_as_soon_as_it_is_known(slow: Owner) -> None:
    slow.mover.expect(5, 0)
    slow.feed()
    slow.mover.gather(slow.move(1, chunk_of(4)), 0, None)
    slow.mover.expect(4, 0)
    slow.wait(1)
    time.sleep(0.01)
    assert not slow.agent_ring.is_done(1), "four more are expected"
    slow.mover.expect(0, 0)
    slow.wait_until_drained()
    slow.mover.gather(slow.move(2, chunk_of(4)), 0, None)
    slow.mover.expect(0, 0)
    assert slow.num_wanted == 6
    slow.feed()
    assert [each.error for each in slow.wait(1)] == [None]


def test_surplus_that_is_enqueued_late_is_skipped_then(slow: Owner) -> None:
    slow.mover.expect(3, 0)
    slow.mover.expect(0, 0)
    time.sleep(0.01)
    slow.feed()
    slow.wait_until_drained()


def test_an_owner_that_claims_too_much_gets_no_more_orders_than_it_was_asked_for(slow: Owner) -> None:
    slow.agent_ring.set_num_enqueued(1 << 40)
    slow.mover.expect(1, 0)
    slow.mover.gather(slow.move(1, chunk_of(4)), 0, None)
    slow.mover.expect(0, 0)
    slow.mover.close()
    assert slow.agent_ring.order_of(0) is OrderCode.SKIP
    assert slow.agent_ring.order_of(1) is None
    slow.feed()


def test_more_moves_than_lanes_wait_for_one(owner: Owner) -> None:
    owner.mover.expect(50, 0)
    source = chunk_of(16)
    for operation in range(50):
        owner.mover.gather(owner.move(operation, source), operation % NUM_SLOTS, None)
    assert [each.operation for each in owner.wait(50)] == list(range(50))


# ---- looks at slots ----


def test_a_look_follows_a_gather(owner: Owner) -> None:
    source = chunk_of(16)
    owner.mover.expect(1, 0)
    owner.mover.gather(owner.move(1, source), 0, lambda: owner.slot(0).copy())
    (moved,) = owner.wait(1)
    np.testing.assert_array_equal(moved.result, packed(owner, source))


def test_a_look_that_finds_fault_lets_no_row_into_a_page(owner: Owner) -> None:
    def look() -> None:
        raise IntegrityError("chunk 1: got another checksum")

    before = owner.pool.array.copy()
    owner.mover.expect(1, 0)
    owner.mover.scatter(owner.move(1, chunk_of(16)), 0, look)
    (moved,) = owner.wait(1)
    assert moved.is_corrupt
    assert "another checksum" in str(moved.error)
    owner.mover.expect(0, 0)
    owner.wait_until_drained()
    np.testing.assert_array_equal(owner.pool.array, before)


def test_a_look_that_fails_after_the_rows_ends_the_move(owner: Owner) -> None:
    def look() -> None:
        raise ValueError("the lease was revoked")

    owner.mover.expect(1, 0)
    owner.mover.gather(owner.move(1, chunk_of(16)), 0, look)
    (moved,) = owner.wait(1)
    assert moved.error == "segment 0: ValueError: the lease was revoked"


# ---- sums ----


def announced(expected: int) -> Callable[[int], None]:
    def judge(found: int) -> None:
        if found != expected:
            raise IntegrityError(f"got {found:#x}, expected {expected:#x}")

    return judge


def cut_up(owner: Owner) -> SegmentSource:
    """A chunk of one segment that takes several orders."""
    owner.agent_ring.max_offsets = 5
    rows = np.random.default_rng(2).permutation(16).astype(np.int64) * 2 * ROW_BYTES
    return SegmentSource(chunk_of(16).plan, (BlockAddresses(0, 0, rows, ROW_BYTES),))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_gather_tells_the_sum_of_all_its_orders(owner: Owner, is_cut: bool) -> None:
    source = cut_up(owner) if is_cut else chunk_of(13)
    num_bytes = source.plan.num_rows * ROW_BYTES
    assert owner.mover.sums_gathers
    owner.mover.gather(owner.move(1, source, row_sum=RowSum(str, num_bytes)), 2, None)
    owner.mover.expect(0, 0)
    (moved,) = owner.wait(1)
    assert (owner.num_enqueued > 1) == is_cut
    assert moved.result == str(row_sum(packed(owner, source)[:num_bytes]))
    assert moved.error is None


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("place", [None, 0, 100, 207])
def test_a_scatter_moves_nothing_of_a_segment_with_another_sum(owner: Owner, place: int | None, is_cut: bool) -> None:
    source = cut_up(owner) if is_cut else chunk_of(13)
    segment = owner.slot(3)[: source.plan.num_rows * ROW_BYTES]
    segment[:] = np.random.default_rng(3).integers(0, 256, segment.size)
    expected = row_sum(segment)
    if place is not None:
        segment[place] ^= 8
    before = owner.pool.array.copy()
    assert owner.mover.checks_scatters
    row_sum_of = RowSum(announced(expected), segment.size, expected)
    owner.mover.scatter(owner.move(1, source, row_sum=row_sum_of), 3, None)
    owner.mover.expect(0, 0)
    (moved,) = owner.wait(1)
    assert (owner.num_enqueued > 1) == is_cut
    assert moved.is_corrupt == (place is not None)
    if place is not None:
        assert moved.error == f"segment 0: IntegrityError: got {row_sum(segment):#x}, expected {expected:#x}"
        np.testing.assert_array_equal(owner.pool.array, before)
    else:
        np.testing.assert_array_equal(packed(owner, source)[: segment.size], segment)


def test_a_cancelled_scatter_is_not_corrupt(slow: Owner) -> None:
    cancel = CancelFlag()
    slow.mover.expect(1, 0)
    slow.agent_ring.set_num_enqueued(1)
    row_sum_of = RowSum(announced(5), 64, 5)
    slow.mover.scatter(slow.move(1, chunk_of(4), cancel=cancel, row_sum=row_sum_of), 0, None)
    slow.mover.expect(0, 0)
    cancel.is_set = True
    slow.feed()
    (moved,) = slow.wait(1)
    assert (moved.was_begun, moved.is_corrupt, moved.error) == (False, False, None)


# ---- ends ----


def test_a_move_without_an_entry_is_cancelled_at_once(slow: Owner) -> None:
    cancel = CancelFlag()
    slow.mover.gather(slow.move(1, chunk_of(4), cancel=cancel), 0, None)
    slow.mover.expect(0, 0)
    cancel.is_set = True
    assert [(each.operation, each.was_begun) for each in slow.wait(1)] == [(1, False)]
    slow.feed()
    slow.wait_until_drained()
    assert not slow.slot(0).any()


def test_a_move_with_an_entry_is_over_when_its_entry_is(slow: Owner) -> None:
    """Until then the stream may be anywhere in it."""
    flags = [CancelFlag(), CancelFlag()]
    slow.mover.expect(2, 0)
    slow.agent_ring.set_num_enqueued(2)  # as one whose stream is busy elsewhere
    for operation, cancel in enumerate(flags):
        slow.mover.gather(slow.move(operation, chunk_of(16), cancel=cancel), operation, None)
    slow.mover.expect(0, 0)
    flags[1].is_set = True
    time.sleep(0.02)
    assert slow.poll() == []
    slow.feed()
    assert [(each.operation, each.was_begun) for each in slow.wait(2)] == [(0, True), (1, False)]
    assert slow.slot(0).any()
    assert not slow.slot(1).any()


def test_a_lost_worker_ends_everything(slow: Owner) -> None:
    hold = threading.Event()
    slow.mover.expect(2, 0)
    slow.agent_ring.set_num_enqueued(1)
    slow.mover.gather(slow.move(1, chunk_of(4)), 0, None)
    slow.mover.gather(slow.move(2, chunk_of(4)), 1, None)
    slow.mover.scatter(slow.move(3, chunk_of(4)), 2, hold.wait)
    slow.mover.stop("the worker is gone")
    hold.set()
    slow.mover.gather(slow.move(4, chunk_of(4)), 3, None)
    ends = slow.wait(4)
    assert {(each.operation, each.error) for each in ends} == {(i, "the worker is gone") for i in (1, 2, 3, 4)}
    slow.num_wanted = 1
    slow.feed()
    slow.wait_until_drained()
    assert not slow.slots.array.any()


def test_closing_leaves_no_stream_waiting(slow: Owner) -> None:
    slow.mover.expect(4, 0)
    slow.feed()
    slow.mover.close()
    slow.mover.close()
    slow.wait_until_drained()


def test_the_agent_is_woken_once_the_timeline_is_reached(owner: Owner) -> None:
    owner.mover.expect(0, 2)
    owner.stream.mark()
    time.sleep(0.01)
    assert owner.poll() == []
    assert owner.mover.timeline == 1
    owner.stream.mark()
    assert select.select([owner.threads.fileno()], [], [], 10.0)[0], "nobody was woken"
    assert owner.poll() == []
    assert owner.mover.timeline == 2


@pytest.mark.parametrize("seed", range(3))
def test_random_moves_and_cancels_all_end_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    with Owner(num_lanes=2) as owner:
        source = chunk_of(64)
        num_ended = 0
        for operation in range(200):
            cancel = CancelFlag()
            owner.mover.expect(rng.randrange(3), 0)
            owner.mover.gather(owner.move(operation, source, rng.randrange(4), cancel), operation % NUM_SLOTS, None)
            owner.mover.expect(0, 0)
            cancel.is_set = rng.random() < 0.3
            if rng.random() < 0.5:
                num_ended += len(owner.poll())
        owner.wait(200 - num_ended)
        owner.wait_until_drained()
