"""The benchmark of rows against slots, on memory of the host: it runs whole and compares bytes."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_nixl


@pytest.mark.nixl
def test_a_quick_run_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "facts.json"
    monkeypatch.setattr("sys.argv", ["gpu_nixl", "--quick", "--json", str(path)])
    assert gpu_nixl.main() == 0
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert [(each["descriptor_bytes"], each["num_descriptors"], each["problem"]) for each in facts] == [
        (1152, 64, ""),
        (256 << 10, 8, ""),
    ]
    assert all(each["gb_s"] > 0.0 for each in facts)
    assert "slots / rows: " in capsys.readouterr().out


def test_rows_are_told_apart_from_what_a_slot_holds() -> None:
    entries = gpu_nixl.rows(4)
    assert [entry[0] // (gpu_nixl.ROW_STEP * gpu_nixl.ROW_BYTES) for entry in entries] == [1, 0, 3, 2]
    assert sorted(entry[1] for entry in entries) == [0, 1152, 2304, 3456]
