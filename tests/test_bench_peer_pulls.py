"""The benchmark of pulls from another GPU, on memory of the host: its orders move the right rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peer_pulls


def test_a_quick_run_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "facts.json"
    monkeypatch.setattr("sys.argv", ["peer_pulls", "--quick", "--json", str(path)])
    assert peer_pulls.main() == 0
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert [(each["dcp"], each["num_streams"]) for each in facts["results"]] == [
        (dcp, num_streams) for dcp in (1, 8) for num_streams in (1, 2) for _ in range(2)
    ]
    assert all(each["gb_s"] > 0.0 for each in facts["results"])
    assert capsys.readouterr().out.count("\n") == 6


def test_wrong_rows_are_noticed() -> None:
    pools = peer_pulls.Pools(peer_pulls.Shape(2, 2), None)
    peer_pulls.measure(pools, 8, 1, 1)
    pools.check(8)
    pools.target[-1] += 1
    with pytest.raises(SystemExit, match="DCP 8, layer 1: got wrong rows"):
        pools.check(8)
