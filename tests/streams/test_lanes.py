"""Which lane an order gets, and what is in it then."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.streams.lanes import Lanes
from kvxfer.streams.ring import LINEAR, NO_SUM, SPAN_WORDS, OrderCode, Ring, Span
from kvxfer.streams.spans import Order

SPAN = Span(16, 3, 16, 0, 0, 0, 1, 0, LINEAR)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(3, 10)
    yield made
    made.close()


def order(first_byte: int, offsets: np.ndarray) -> Order:
    words = np.zeros(SPAN_WORDS, dtype=np.int64)
    words[:9] = SPAN._replace(src_first_byte=first_byte)
    return Order(words.data, offsets)


def written(ring: Ring, lane: int) -> tuple[int, list[int]]:
    """First byte of the span and table of the order in the lane."""
    ring.order(0, OrderCode.RUN, lane)
    return ring.spans_of(0)[0].src_first_byte, ring.offsets_of(0)[:3].tolist()


def test_lanes_are_taken_in_turn_and_hold_what_they_were_given(ring: Ring) -> None:
    lanes = Lanes(ring)
    tables = [np.arange(idx, idx + 3, dtype=np.int64) for idx in range(4)]
    taken = [lanes.take(order(idx, tables[idx]), NO_SUM, (4, 100)) for idx in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert not lanes
    assert [written(ring, lane) for lane in taken] == [(100 + idx, tables[idx].tolist()) for idx in range(3)]
    for lane in taken:
        lanes.give_back(lane)
    assert lanes
    assert lanes.take(order(7, tables[3]), NO_SUM, (0, 0)) == taken[0]
    assert written(ring, taken[0]) == (7, [3, 4, 5])


def test_a_lane_that_has_the_table_is_taken_first_and_keeps_it(ring: Ring) -> None:
    lanes = Lanes(ring)
    tables = [np.arange(idx, idx + 3, dtype=np.int64) for idx in range(3)]
    taken = [lanes.take(order(0, table), NO_SUM, (0, 0)) for table in tables]
    for lane in taken:
        lanes.give_back(lane)
    kept = taken[1]
    lanes.take(order(0, np.empty(0, dtype=np.int64)), NO_SUM, (0, 0))  # leaves the table where it is
    assert lanes.take(order(9, tables[1]), NO_SUM, (0, 0)) == kept
    assert written(ring, kept) == (9, [1, 2, 3])
    lanes.give_back(kept)
    ring.order(1, OrderCode.RUN, kept)
    ring.offsets_of(1)[0] = 77  # what nobody does: shows that the table is not written again
    assert lanes.take(order(9, tables[1]), NO_SUM, (0, 0)) == kept
    assert written(ring, kept)[1] == [77, 2, 3]
    lanes.give_back(kept)
    assert lanes.take(order(9, tables[1].copy()), NO_SUM, (0, 0)) != kept, "an equal table is another one"


def test_a_table_that_another_has_replaced_is_written_again(ring: Ring) -> None:
    lanes = Lanes(ring)
    first, second = np.arange(3), np.arange(5, 8)
    for table in (first, second, first):
        lanes_of_ring = [lanes.take(order(0, table), NO_SUM, (0, 0)) for _ in range(3)]
        assert [written(ring, lane)[1] for lane in lanes_of_ring] == [table.tolist()] * 3
        for lane in lanes_of_ring:
            lanes.give_back(lane)
