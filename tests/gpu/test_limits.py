"""The time limit of GPU tests, without a GPU."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.gpu import limits

ROOT = Path(__file__).parents[2]
HANGS = """
from tests.gpu import limits
import threading
limits._GRACE_S = 0.2
with limits.limit(0.1):
    threading.Event().wait()
"""


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Something that waits until it is skipped."""
    event = threading.Event()
    monkeypatch.setattr(limits, "skippers", {event.set})
    return event


def test_what_hangs_is_freed_and_fails(waiting: threading.Event, tmp_path: Path) -> None:
    with (tmp_path / "told").open("w+") as told:
        with pytest.raises(pytest.fail.Exception, match=r"took longer than 0\.05 s"), limits.limit(0.05, told.fileno()):
            assert waiting.wait(10)
        told.seek(0)
        assert "test_what_hangs_is_freed_and_fails" in told.read()


def test_what_ends_in_time_passes(waiting: threading.Event) -> None:
    with limits.limit(10.0, 2):
        pass
    assert not waiting.is_set()


def test_what_cannot_be_freed_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
