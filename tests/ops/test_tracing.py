"""What agents note of their operations: true times, a bound, nothing unless asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.ops import tracing
from kvxfer.ops.tracing import Trace, read_trace


def test_a_line_for_each_operation_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace = Trace(str(path))
    before_s = time.monotonic()
    trace.begin("gather", 1, 5, 0)
    trace.begin("write", 1, None, 2)  # writes have numbers of their own
    trace.end("write", 1)
    trace.end("gather", 1, 0.25)
    trace.begin("scatter", 2, 0, 3)
    trace.end("scatter", 7)
    trace.close()
    trace.close()
    write, gather = read_trace(path.read_bytes())
    assert (write.kind, write.slot, write.segment) == ("write", None, 2)
    assert write.busy_s == write.ended_s - write.given_s >= 0.0
    assert (gather.kind, gather.slot, gather.segment, gather.busy_s) == ("gather", 5, 0, 0.25)
    assert before_s <= gather.given_s <= write.given_s <= write.ended_s <= gather.ended_s <= time.monotonic()


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_OPERATIONS", 3)
    path = tmp_path / "trace"
    trace = Trace(str(path))
    for operation in range(10):
        trace.begin("gather", operation, 0, operation)
        trace.end("gather", operation, 0.0)
    trace.close()
    assert [each.segment for each in read_trace(path.read_bytes())] == [0, 1, 2]


def test_without_a_file_nothing_is_kept() -> None:
    trace = Trace("")
    trace.begin("gather", 1, 0, 0)
    trace.end("gather", 1, 0.0)
    trace.close()


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^ops.trace_file: got .* cannot be written: No such file or directory$"):
        Trace(str(tmp_path / "nowhere" / "trace"))


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace("/dev/full")
    for operation in range(1000):
        trace.begin("gather", operation, 0, operation)
        trace.end("gather", operation, 0.0)
    trace.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        "ops.trace_file: /dev/full cannot be written any more (No space left on device): the trace ends here"
    )


def test_a_disk_that_is_full_at_the_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace("/dev/full")
    trace.begin("gather", 1, 0, 1)
    trace.end("gather", 1, 0.0)
    trace.close()
    trace.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
