"""The thread that stands in for a GPU's stream: order, SKIP, bounds, timeline, and an end that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.errors import ContractError
from kvxfer.memory import HostMemory
from kvxfer.row_sums import row_sum
from kvxfer.streams.host_stream import HostRowStream
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Ring, Span, SumKind, SumOrder

NO_OFFSETS = np.empty(0, dtype=np.int64)


class _Stage:
    def __init__(self) -> None:
        self.ring = Ring.create(2, 100, staging_bytes=128)
        self.pool, self.slots = HostMemory.create(4096, "pool"), HostMemory.create(4096, "slots")
        self.pool.array[:] = np.arange(4096) % 251
        self.stream = HostRowStream(self.ring, self.pool, self.slots)
        self.num_enqueued = 0

    def enqueue(self) -> int:
        number = self.num_enqueued
        self.stream.enqueue(number)
        self.num_enqueued += 1
        return number

    def wait(self, number: int) -> None:
        deadline_s = time.monotonic() + 10.0
        while not self.ring.is_done(number):
            assert time.monotonic() < deadline_s
            time.sleep(0.0005)


@pytest.fixture
def stage() -> Iterator[_Stage]:
    found = _Stage()
    yield found
    found.stream.close()
    found.pool.close()
    found.slots.close()
    found.ring.close()


def pack(row_bytes: int, num_rows: int, *, src: int = 0, table: int = LINEAR, dst: int = 0, word: int = 1) -> Span:
    return Span(row_bytes, num_rows, word, MemoryIndex.POOL, src, table, MemoryIndex.SLOTS, dst, LINEAR)


def test_an_entry_moves_what_its_order_says_when_it_comes(stage: _Stage) -> None:
    number = stage.enqueue()
    time.sleep(0.01)
    assert not stage.ring.is_done(number)
    offsets = np.array([100, 7, 3000], dtype=np.int64)
    stage.ring.fill_lane(1, [pack(5, 3, src=1, table=0, dst=64), pack(16, 2, src=32)], offsets)
    stage.ring.order(number, OrderCode.RUN, 1)
    stage.wait(number)
    expected = np.zeros(4096, dtype=np.uint8)
    expected[64:79] = np.concatenate([stage.pool.array[1 + offset : 6 + offset] for offset in offsets])
    expected[:32] = stage.pool.array[32:64]
    np.testing.assert_array_equal(stage.slots.array, expected)


def test_a_gather_tells_the_sum_of_its_segment(stage: _Stage) -> None:
    """Rows that lie one behind the other, and some that do not; one is left out."""
    offsets = np.array([5, 100, 7, 4090], dtype=np.int64)
    spans = [pack(13, 3, src=1, table=0, dst=64), pack(16, 2, src=32, dst=128), pack(16, 1, src=4090, dst=160)]
    spans.append(pack(7, 3, dst=256)._replace(dst_table=1))
    number = stage.enqueue()
    stage.ring.fill_lane(1, spans, offsets, SumOrder(SumKind.MOVED, 64))
    stage.ring.order(number, OrderCode.RUN, 1)
    stage.wait(number)
    assert stage.slots.array[256 + 100] == stage.pool.array[0]
    assert stage.ring.sum_of(number) == row_sum(stage.slots.array[64:1024])


def test_a_segment_that_is_not_as_announced_moves_nothing(stage: _Stage) -> None:
    stage.slots.array[:] = np.arange(4096) % 241
    segment = stage.slots.array[512:612]
    summed = SumOrder(SumKind.CHECKED, 512, 100, row_sum(segment))
    span = Span(100, 1, 4, MemoryIndex.STAGING, 0, LINEAR, MemoryIndex.POOL, 1000, LINEAR)
    before = stage.pool.array.copy()
    wrong = [summed._replace(num_bytes=number) for number in (0, -4, 99, 129)]
    wrong += [summed._replace(first_byte=number) for number in (-16, 528, 4080)]
    for each in [*wrong, summed]:
        number = stage.enqueue()
        stage.ring.fill_lane(0, [span], NO_OFFSETS, each)
        stage.ring.order(number, OrderCode.RUN, 0)
        stage.wait(number)
        assert (stage.ring.sum_of(number) == summed.expected) == (each is summed)
        if each is not summed:
            np.testing.assert_array_equal(stage.pool.array, before)
    np.testing.assert_array_equal(stage.pool.array[1000:1100], segment)


def test_a_skipped_entry_moves_nothing(stage: _Stage) -> None:
    stage.ring.fill_lane(0, [pack(16, 2)], NO_OFFSETS)
    first, second = stage.enqueue(), stage.enqueue()
    stage.ring.order(second, OrderCode.RUN, 0)
    time.sleep(0.01)
    assert not stage.ring.is_done(second), "entries run in the order of their numbers"
    stage.ring.order(first, OrderCode.RUN, 0)
    stage.wait(second)
    stage.slots.array[:] = 0
    third = stage.enqueue()
    stage.ring.order(third, OrderCode.SKIP)
    stage.wait(third)
    assert not stage.slots.array.any()


def test_words_of_an_entry_serve_again_after_a_turn_of_the_ring(stage: _Stage) -> None:
    for _ in range(1030):
        stage.ring.order(stage.enqueue(), OrderCode.SKIP)
    stage.wait(1029)
    number = stage.enqueue()
    time.sleep(0.005)
    assert not stage.ring.is_done(number), "the order of the last turn is none for this one"
    stage.ring.order(number, OrderCode.SKIP)
    stage.wait(number)


@pytest.mark.parametrize(
    "span",
    [pack(16, 2, src=4096 - 16), pack(16, 2, src=-16), pack(16, 2, dst=4096 - 16), pack(5000, 1)],
    ids=["behind the pool", "before the pool", "behind the slots", "larger than both"],
)
def test_rows_outside_are_left_out(stage: _Stage, span: Span) -> None:
    number = stage.enqueue()
    stage.ring.fill_lane(0, [span, pack(8, 1, src=8, dst=2048)], NO_OFFSETS)
    stage.ring.order(number, OrderCode.RUN, 0)
    stage.wait(number)
    np.testing.assert_array_equal(stage.slots.array[2048:2056], stage.pool.array[8:16])
    assert np.count_nonzero(stage.slots.array) <= 16 + 8


def test_spans_may_name_other_memories(stage: _Stage) -> None:
    """A peer's pool, or slots that have moved. A memory that is not there moves nothing."""
    span = Span(16, 1, 1, 2, 0, LINEAR, MemoryIndex.POOL, 0, LINEAR)
    with HostMemory.create(64, "peer") as peer:
        peer.array[:] = 9
        for is_there in (False, True):
            if is_there:
                stage.stream.set_memory(2, peer)
            number = stage.enqueue()
            stage.ring.fill_lane(0, [span], NO_OFFSETS)
            stage.ring.order(number, OrderCode.RUN, 0)
            stage.wait(number)
            assert (stage.pool.array[:16] == 9).all() == is_there


def test_the_timeline_rises_with_every_mark(stage: _Stage) -> None:
    assert [stage.stream.mark(), stage.stream.mark(None)] == [1, 2]
    assert stage.ring.timeline == 2
    with pytest.raises(ContractError, match="a host pool has no streams"):
        stage.stream.mark(object())


def test_closing_waits_for_what_is_enqueued(stage: _Stage) -> None:
    number = stage.enqueue()
    stage.ring.fill_lane(0, [pack(16, 2)], NO_OFFSETS)
    timer = threading.Timer(0.05, stage.ring.order, (number, OrderCode.RUN, 0))
    timer.start()
    stage.stream.close()
    assert stage.ring.is_done(number)
    assert stage.slots.array[:32].any()
    stage.stream.close()
    timer.join()
