"""Logs of the agents: one JSON object a line on standard error, so that collectors need no parser of their own."""

from __future__ import annotations

import logging
import sys
import time

import msgspec

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_MAX_LINES_PER_S = 20


class Sparing(logging.Filter):
    """Lets each place in the code log 20 lines a second and no more, so that no peer can fill a disk with what it is
    refused for. The first line after that says as `suppressed` how many are missing."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}  # place: second, lines in it
        self._suppressed: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        place = (record.pathname, record.lineno)
        second = int(record.created)
        last_second, num_lines = self._seen.get(place, (second, 0))
        num_lines = num_lines + 1 if last_second == second else 1
        self._seen[place] = (second, num_lines)
        if num_lines > _MAX_LINES_PER_S:
            self._suppressed[place] = self._suppressed.get(place, 0) + 1
            return False
        if place in self._suppressed:
            record.suppressed = self._suppressed.pop(place)
        return True


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
    handler.addFilter(Sparing())
    logger = logging.getLogger("kvxfer")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
