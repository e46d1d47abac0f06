"""`python -m benchmarks.multi_gpu` and its transfers: what they run, and what becomes of what fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import multi_gpu, multi_gpu_transfer
from benchmarks.gpu_transfer import Named
from benchmarks.multi_gpu import Part, run_part
from kvxfer.cli.ensemble import gpu_of_rank


def test_ranks_have_other_gpus_than_the_prefill_worker() -> None:
    assert [gpu_of_rank(rank, 1) for rank in range(3)] == [0, 0, 0]
    assert [gpu_of_rank(rank, 2) for rank in range(3)] == [1, 1, 1]
    assert [gpu_of_rank(rank, 4) for rank in range(5)] == [1, 2, 3, 1, 2]


@pytest.mark.parametrize(("num_gpus", "sizes"), [(2, [1, 2, 4]), (4, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_cases_can_be_run(num_gpus: int, sizes: list[int]) -> None:
    cases = multi_gpu_transfer.all_cases(num_gpus, 3)
    for each in cases:
        each.case.check()
        assert each.case.num_gpus == num_gpus
    assert len({each.name for each in cases}) == len(cases)
    assert sorted({each.case.num_ranks for each in cases}) == sizes
    assert {each.case.mode for each in cases} == {"p2p", "packed", "serial"}


@pytest.mark.parametrize(("num_gpus", "worlds"), [(2, [2]), (4, [2, 4]), (8, [2, 4, 8])])
def test_parts_follow_the_gpus(num_gpus: int, worlds: list[int]) -> None:
    names = [part.name for part in multi_gpu.all_parts(num_gpus, quick=False)]
    assert names == [
        "pulls",
        "stream",
        "rows",
        "slots",
        "judge",
        "peers",
        *(f"combine {world}" for world in worlds),
        "merge",
    ]


def test_what_becomes_of_parts(tmp_path: Path) -> None:
    facts = tmp_path / "given.json"
    facts.write_text('{"a": 1}')
    printed = run_part(Part("printed", ("json.tool", str(facts)), 60.0, prints_facts=True))
    assert (printed.verdict, printed.facts) == ("ran", {"a": 1})
    written = run_part(Part("written", ("json.tool", str(facts), multi_gpu._FACTS), 60.0))
    assert (written.verdict, written.facts) == ("ran", {"a": 1})
    failed = run_part(Part("failed", ("json.tool", str(tmp_path / "none")), 60.0, prints_facts=True))
    assert (failed.verdict, failed.facts) == ("failed, exit status 2", None)
    assert "No such file" in failed.output
    slow = run_part(Part("slow", ("timeit", "-n1", "-r1", "import time; time.sleep(100)"), 1.0))
    assert (slow.verdict, slow.exit_status) == ("its time was over", None)
    assert slow.elapsed_s < 60


def test_merges_are_told_by_ranks_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"part": "whole", "way": way, "batch": batch, "us": us}
        for way, batch, us in (("a2a", 1, 2.0), ("ag_rs", 1, 3.0), ("packed", 8, 4.0), ("apart", 8, 5.0))
    ]
    rows.append({"part": "pack", "way": "a2a", "batch": 1, "us": 9.0})
    multi_gpu.print_combine([multi_gpu.Outcome("combine 2", 0, 1.0, "", {"world": 2, "rows": rows})])
    printed = capsys.readouterr().out
    assert "| 2 | 1 | 2.0 | 3.0 |  |  |\n| 2 | 8 |  |  | 4.0 | 5.0 |\n" in printed


def test_a_case_that_fails_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slots = next(each for each in multi_gpu_transfer.all_cases(2, 1) if each.case.mode == "packed")
    good = replace(multi_gpu_transfer._quick(slots.case), num_ranks=1, transport="loopback")
    # What has arrived comes before the clock: only a wire that is slower than the deadline is sure to miss it.
    bad = replace(good, deadline_s=0.2, wire_gb_s=1e-6)
    path = tmp_path / "facts.json"
    cases = [Named("first", good), Named("bad", bad), Named("last", replace(good, mode="serial"))]
    facts, all_ran = multi_gpu_transfer.run(cases, None, 60.0, path)
    assert [(each["name"], each["verified"]) for each in facts] == [("first", True), ("last", True)]
    assert not all_ran
    assert json.loads(path.read_text()) == facts
    assert "\nbad failed: " in capsys.readouterr().out
    assert multi_gpu_transfer.run(cases[:1], None, -1.0, None) == ([], True)
    assert "left out after -1 s: first" in capsys.readouterr().out


def test_goals_of_pulls(capsys: pytest.CaptureFixture[str]) -> None:
    multi_gpu_transfer.print_goals([{"name": "p2p", "mode": "p2p", "efficiency": 0.9}, {"mode": "packed"}])
    assert "| pull / copy from GPU to GPU, p2p | 0.900 | at least 0.85 |" in capsys.readouterr().out
