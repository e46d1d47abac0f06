"""Live agents under fuzzed frames; `python -m tests.fuzz live` sends a million."""

from __future__ import annotations

from tests.fuzz.live import attack


def test_agents_live_and_move_on() -> None:
    report = attack(8_000, seed=3)
    assert report.is_right, report.as_text()
