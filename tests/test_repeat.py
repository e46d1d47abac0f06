"""A test that fails now and then is found, and a run without a fault is no failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import repeat

FLAKY = """
from pathlib import Path

def test_every_second_time():
    count = Path(__file__).with_name("count")
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    assert number % 2 == 0

def test_good():
    pass
"""


def test_it_counts_who_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_flaky.py"
    path.write_text(FLAKY, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["repeat", str(path), "--rootdir", str(tmp_path), "--times", "3"])
    assert repeat.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 of 3 runs were good"
    assert lines[-2].endswith("test_flaky.py::test_every_second_time: failed in 1 of 3 runs")
    monkeypatch.setattr("sys.argv", ["repeat", f"{path}::test_good", "--rootdir", str(tmp_path), "--times", "1"])
    assert repeat.main() == 0
