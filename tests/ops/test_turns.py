"""Slots that are too few for the turns that an agent has on its GPU."""

from __future__ import annotations

import logging

import pytest

from kvxfer.ops.turns import TurnWatch

_LOG = logging.getLogger("tests.ops")
SLOT_BYTES = 8 << 20


def test_what_is_missing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = TurnWatch(8, SLOT_BYTES, _LOG)
    with caplog.at_level(logging.WARNING):
        watch.look(0.26e-3, 50e9)
        assert (watch.num_wanted, caplog.messages) == (0, [])
        watch.look(2.39e-3, 50e9)
        assert watch.num_wanted == 22
        watch.look(2.4e-3, 100e9)
        assert watch.num_wanted == 43
    assert caplog.messages == [
        "slots.num_slots: got 8, expected 22: this agent has a turn on the GPU every 2.39 ms, so that its slots carry "
        "28.1 GB/s, and the path to a peer 50.0 GB/s"
    ]
    watch.look(0.26e-3, 50e9)
    assert watch.num_wanted == 0, "the GPU is idle again"


@pytest.mark.parametrize(("turn_s", "bytes_per_s"), [(None, 50e9), (2.4e-3, 0.0), (1.342e-3, 50e9)])
def test_nothing_is_said_where_there_are_enough_or_nothing_is_known(
    turn_s: float | None, bytes_per_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    watch = TurnWatch(8, SLOT_BYTES, _LOG)
    with caplog.at_level(logging.WARNING):
        watch.look(turn_s, bytes_per_s)
    assert (watch.num_wanted, caplog.messages) == (0, [])


def test_as_many_as_are_wanted_are_enough() -> None:
    few = TurnWatch(1, SLOT_BYTES, _LOG)
    few.look(2.4e-3, 50e9)
    enough = TurnWatch(few.num_wanted, SLOT_BYTES, _LOG)
    enough.look(2.4e-3, 50e9)
    assert (few.num_wanted, enough.num_wanted) == (22, 0)
