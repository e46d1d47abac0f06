"""The benchmark of the emulated wire, on small segments: it runs whole, compares bytes and keeps the pace."""

import json

import pytest

from benchmarks.wire import main


def test_a_wire_is_no_faster_than_asked_and_every_byte_is_compared(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gb-s", "0.05", "--segment-mib", "1,2", "--copiers", "1,2", "--threads", "1", "--seconds", "0.2"]
    assert main([*arguments, "--loop-us", "10", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["memmove_gb_s"]["1"] > 0.0
    runs = report["runs"]
    expected = [(mib << 20, copiers) for mib in (1, 2) for copiers in (1, 2)]
    assert [(run["segment_bytes"], run["num_copiers"]) for run in runs] == expected
    assert [run["problem"] for run in runs] == [""] * 4
    assert all(0.0 < run["share"] <= 1.0 for run in runs)
    assert all(run["num_writes"] >= 4 for run in runs)
    assert all(run["loop_us"] > 0.0 and run["slowest_write_ms"] >= 20.0 for run in runs)
