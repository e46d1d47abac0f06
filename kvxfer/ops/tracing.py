"""What an agent did when: one JSON object a line for each gather, write and scatter that has ended.

Off unless `ops.trace_file` names a file. `given_s` and `ended_s` are what the agent's loop read on the host's monotonic
clock (`time.monotonic`), the same for all processes of a host; the work itself filled the last `busy_s` seconds of that
where it was timed: a gather or scatter by whoever moved the rows (a stream: from the order on), a write end to end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Literal

import msgspec

from kvxfer.errors import ConfigError

MAX_OPERATIONS = 200_000
"""What comes after so many is not written: some 40 MB."""

_log = logging.getLogger("kvxfer.ops")

OperationKind = Literal["gather", "write", "scatter"]


class TracedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. `slot` is the agent's own slot. None: a raw write, or a scatter that is a pull."""

    kind: OperationKind
    slot: int | None
    segment: int
    given_s: float
    ended_s: float
    busy_s: float


class Trace:
    """Writes the lines, in blocks. `begin` and `end` are called by the agent's loop alone; without a file they do
    nothing. One that takes no more, on a full disk, ends the trace and nothing else."""

    def __init__(self, path: str) -> None:
        """Make the file, or empty it. Raises `ConfigError` where that cannot be done. No file with an empty `path`."""
        self._path = path
        self._given: dict[tuple[OperationKind, int], tuple[int | None, int, float]] = {}
        self._num_left = MAX_OPERATIONS
        self._encoder = msgspec.json.Encoder()
        try:
            self._file = open(path, "wb") if path else None  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise ConfigError(f"ops.trace_file: got {path!r}, which cannot be written: {error.strerror}") from error

    def begin(self, kind: OperationKind, operation: int, slot: int | None, segment: int) -> None:
        """An operation is handed to whoever performs it; `operation` is its number among those of its kind."""
        if self._file is not None and self._num_left > 0:
            self._given[kind, operation] = (slot, segment, time.monotonic())

    def end(self, kind: OperationKind, operation: int, busy_s: float | None = None) -> None:
        """The loop has seen its end. Without `busy_s` it was busy all the time."""
        if self._file is None or (begun := self._given.pop((kind, operation), None)) is None:
            return
        slot, segment, given_s = begun
        ended_s = time.monotonic()
        line = TracedOperation(
            kind=kind,
            slot=slot,
            segment=segment,
            given_s=given_s,
            ended_s=ended_s,
            busy_s=ended_s - given_s if busy_s is None else busy_s,
        )
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
        except OSError as error:
            self._give_up(error)
        self._num_left -= 1

    def close(self) -> None:
        """Write out what is left. Calling it again does nothing."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)
            self._file = None

    def _give_up(self, error: OSError) -> None:
        _log.error(
            "ops.trace_file: %s cannot be written any more (%s): the trace ends here", self._path, error.strerror
        )
        file, self._file = self._file, None
        self._given.clear()
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written cannot be now; the descriptor is closed
                file.close()


def read_trace(text: bytes) -> list[TracedOperation]:
    """The operations in a file that a `Trace` has written."""
    decoder = msgspec.json.Decoder(TracedOperation)
    return [decoder.decode(line) for line in text.splitlines()]
