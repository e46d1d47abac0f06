"""What the benchmarks say on a machine without the GPUs that they take, and where nothing is left to be run."""

from __future__ import annotations

import importlib

import pytest
import torch

_WITH_QUICK = ["gpu_transfer", "multi_gpu", "multi_gpu_transfer", "peer_pulls"]


def _error(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    name, *arguments = command.split()
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", [*_WITH_QUICK, "gpu_stream", "gpu_turns", "peer_pulls --owner 3"])
def test_too_few_gpus(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    error = _error(command, monkeypatch, capsys)
    assert ": error: got 0 GPUs, expected at least " in error
    assert error.endswith("; --quick tries the command without them") == (command.split()[0] in _WITH_QUICK)


@pytest.mark.parametrize(
    "command", ["gpu_transfer --quick --only nil", "multi_gpu --quick --only nil", "gpu_stream --only idle,nil"]
)
def test_a_part_that_does_not_exist(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ": error: --only: got " in _error(command, monkeypatch, capsys)
