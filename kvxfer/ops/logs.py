"""Logs of the agents: one JSON object a line on standard error, so that collectors need no parser of their own."""

from __future__ import annotations

import logging
import sys
import time

import msgspec

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as `{"time", "level", "logger", "message"}` plus whatever was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up_logging(level: str) -> None:
    """Send everything that `kvxfer` logs at `level` (`"debug"` to `"error"`) or above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("kvxfer")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
