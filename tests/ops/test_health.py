"""Health and readiness as functions of what the loop shows of itself."""

from __future__ import annotations

import time

from kvxfer.ops.health import MAX_SILENCE_S, Pulse


def test_an_agent_that_starts_is_alive_and_not_ready() -> None:
    pulse = Pulse()
    assert pulse.trouble() == ""
    assert pulse.unreadiness() == "starting"


def test_a_loop_that_turns() -> None:
    pulse = Pulse(turned_at=time.monotonic() - MAX_SILENCE_S + 1.0)
    assert pulse.trouble() == ""
    assert pulse.unreadiness() == ""


def test_a_loop_that_does_not() -> None:
    pulse = Pulse(turned_at=time.monotonic() - MAX_SILENCE_S - 0.01)
    assert pulse.trouble().startswith("the loop has not turned for 5.0")
    assert pulse.unreadiness() == pulse.trouble()


def test_an_agent_that_drains_is_alive() -> None:
    pulse = Pulse(turned_at=time.monotonic(), is_draining=True)
    assert pulse.trouble() == ""
    assert pulse.unreadiness() == "shutting down"


def test_a_fault_stays() -> None:
    pulse = Pulse(turned_at=time.monotonic(), fault="thread x has ended by an error")
    assert pulse.trouble() == pulse.unreadiness() == "thread x has ended by an error"
