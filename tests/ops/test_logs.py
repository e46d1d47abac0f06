"""Every log line of an agent is one JSON object."""

import json
import logging

from kvxfer.ops.logs import JsonLines


def _format(record: logging.LogRecord) -> dict[str, object]:
    line = JsonLines().format(record)
    assert "\n" not in line
    parsed: dict[str, object] = json.loads(line)
    return parsed


def test_fields() -> None:
    record = logging.makeLogRecord(
        {
            "name": "kvxfer.x",
            "levelname": "WARNING",
            "msg": "slot %d\nlost",
            "args": (3,),
            "created": 0.25,
            "msecs": 250.0,
        }
    )
    record.peer = "abc"
    record.path = logging  # whatever a caller attaches is written as text
    assert _format(record) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "kvxfer.x",
        "message": "slot 3\nlost",
        "peer": "abc",
        "path": str(logging),
    }


def test_exceptions() -> None:
    try:
        int("no")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (type(error), error, error.__traceback__)})
    assert "ValueError: invalid literal" in str(_format(record)["exception"])
