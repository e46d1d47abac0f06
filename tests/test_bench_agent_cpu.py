"""The benchmark of what a segment costs the agents: that every byte arrives and every figure is there."""

import json
from pathlib import Path

import pytest

from benchmarks import agent_cpu
from kvxfer.cli.ensemble import Move
from kvxfer.cli.harness import ThreadsTime
from kvxfer.control.messages import TransferStats


def test_figures_are_for_one_segment_and_medians_over_the_transfers() -> None:
    sent = TransferStats(num_rows=8, num_bytes=800, num_segments=4)
    moves = tuple(
        Move(1.0, 0.5, sent, (), (), agent_cpu=(ThreadsTime(4e-3 * factor, 1e-3), *[ThreadsTime(2e-3, 2e-3)] * 2))
        for factor in (1, 2, 9)
    )
    assert agent_cpu.us_per_segment(moves, lambda times: times[:1]) == pytest.approx(
        {"main": 2000, "others": 250, "all": 2250}
    )
    assert agent_cpu.us_per_segment(moves, lambda times: times[1:]) == pytest.approx(
        {"main": 1000, "others": 1000, "all": 2000}
    )


@pytest.mark.parametrize("placement", ["worker", "agent"])
def test_a_run_reports_both_sides(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "facts.json"
    arguments = ["--placement", placement, "--ranks", "2", "--repeat", "1", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["agent_cpu", *arguments])
    assert agent_cpu.main() == 0
    facts = json.loads(path.read_text())
    assert (facts["placement"], facts["ranks"], facts["problems"]) == (placement, 2, [])
    assert 280 <= facts["segments"] <= 300
    for side in ("prefill_us", "decode_us"):
        assert facts[side]["main"] > 0
        assert facts[side]["others"] > 0
    assert "| prefill |" in capsys.readouterr().out
