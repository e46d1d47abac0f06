"""A flood of log lines is cut, and said to be."""

import logging

from kvxfer.ops.logs import Sparing


def _record(second: float, line: int = 1) -> logging.LogRecord:
    return logging.makeLogRecord({"created": second, "pathname": "a.py", "lineno": line, "msg": "refused"})


def test_a_place_may_log_twenty_lines_a_second() -> None:
    sparing = Sparing()
    assert sum(sparing.filter(_record(5.0 + number / 1000)) for number in range(500)) == 20
    assert sparing.filter(_record(5.9, line=2)), "other places go on"
    late = _record(6.0)
    assert sparing.filter(late)
    assert vars(late)["suppressed"] == 480
    assert sparing.filter(after := _record(6.1))
    assert "suppressed" not in vars(after)
