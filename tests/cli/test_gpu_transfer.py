"""`python -m benchmarks.gpu_transfer`: its cases, its table of goals, and a run of it without a GPU."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks import gpu_transfer
from kvxfer.cli.bench_transfer import TransferResult
from kvxfer.cli.ensemble import Move
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.control.messages import TransferStats


def _result(case: TransferCase, share: float) -> TransferResult:
    elapsed_s = case.num_bytes / ((case.wire_gb_s or 200.0) * 1e9) / share
    copy_s = elapsed_s / 2 if case.has_yardstick else None
    stats = TransferStats(num_segments=10)
    tail_s = elapsed_s * min(1.0, case.chunk_tokens / case.num_tokens)
    move = Move(elapsed_s=elapsed_s, tail_s=tail_s, sent=stats, landed=(stats,), landed_s=(elapsed_s,))
    return TransferResult(case, 0.1, (replace(move, client_cpu_s=3e-4, products_per_s=96.0),), copy_s, "", (), 100.0)


def test_cases_can_be_run_and_those_that_share_agents_are_neighbours() -> None:
    cases = gpu_transfer.all_cases(gpu_transfer._CASE)
    for each in cases:
        each.case.check()
    assert len({each.name for each in cases}) == len(cases)
    setups = [setup for setup, _ in groupby(each.case.setup() for each in cases)]
    assert all(setups.count(setup) == 1 for setup in setups)
    src, _ = cases[0].case.slots()
    assert src.num_slots * src.slot_bytes == 64 << 20


def test_goals_are_computed_from_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    cases = gpu_transfer.all_cases(gpu_transfer._CASE)
    shares = {each.name: 0.96 if "512" in each.name else 0.5 if "serial" in each.name else 0.93 for each in cases}
    gpu_transfer.print_goals({each.name: _result(each.case, shares[each.name]) for each in cases})
    printed = capsys.readouterr().out
    assert "| share of the wire, dcp 4, 4096 tokens | 0.930 | at least 0.85 |" in printed
    assert "| 64 MiB of slots / 512 MiB, dcp 8, 32768 tokens | 0.969 | at least 0.95 |" in printed
    assert "| serial: share of the wire, dcp 8, 4096 tokens | 0.500 |  |" in printed
    assert "| pulls / a copy on the device, dcp 8 | 0.500 | as near 1 as can be |" in printed
    assert "| pulls / packed, dcp 4 | 4.000 | at least 3 |" in printed
    assert "| share of the wire, device slots, busy long | 0.930 | at least 0.95 |" in printed
    assert "| worker keeps, busy short | 0.960 | at least 0.93 |" in printed
    assert "| worker's us a segment, busy long | 30.000 | at most 40 |" in printed
    assert "| tail of chunks of 4096 / one such chunk alone | 1.000 | at most 1.2 |" in printed
    gpu_transfer.print_goals({})
    assert capsys.readouterr().out.count("\n") == 3  # the head of the table alone


@pytest.mark.parametrize("only", ["dcp 4, 4096 tokens", "dcp 8, p2p"])
def test_a_quick_run_without_a_gpu(
    only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "facts.json"
    arguments = ["--quick", "--repeat", "1", "--only", only, "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["gpu_transfer", *arguments])
    assert gpu_transfer.main() == 0
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert [(each["name"], each["verified"], each["placement"]) for each in facts] == [(only, True, "worker")]
    printed = capsys.readouterr().out
    assert f"| {only} | " in printed
    assert "| goal |" not in printed  # they say nothing of host memory
    monkeypatch.setattr("sys.argv", ["gpu_transfer", *arguments, "--seconds", "-1"])
    assert gpu_transfer.main() == 0
    assert f"left out after -1 s: {only}" in capsys.readouterr().out


def test_a_case_that_fails_ends_the_run_with_what_all_processes_said(capsys: pytest.CaptureFixture[str]) -> None:
    good = gpu_transfer._quick(gpu_transfer.Named("good", replace(gpu_transfer._CASE, num_tokens=4096, num_ranks=4)))
    # What has arrived comes before the clock: only a wire that is slower than the deadline is sure to miss it.
    bad = gpu_transfer.Named("bad", replace(good.case, deadline_s=0.2, wire_gb_s=1e-6))
    results, all_ran = gpu_transfer.run([good, bad, good], 60.0, None)
    assert list(results) == ["good"]
    assert not all_ran
    printed = capsys.readouterr().out
    assert "bad failed; the last words of all processes:" in printed
    assert "prefill-agent.log | " in printed
    assert "ended early: " in printed
