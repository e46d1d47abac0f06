"""Threads that perform gathers and scatters: any time in the queue, before the bytes move, and after."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.addresses import BlockAddresses
from kvxfer.control.messages import Segment
from kvxfer.operations import CancelFlag, SegmentSource
from kvxfer.segments import ChunkPlan
from tests.simulation.choices import DelayShape
from tests.simulation.clock import Process
from tests.simulation.schedule import Faults

Copy = tuple[int, int, int]  # pool offset, slot offset, bytes


@dataclass(slots=True, eq=False)
class Operation:
    """A gather or scatter from its emission until the core knows its end. `transfers` are those whose rows it moves."""

    operation: int
    slot: int
    transfer: str
    source: SegmentSource
    segment: int
    cancel: CancelFlag
    owner: object | None  # the worker's side of the transfer
    notice: Segment | None = None  # of a scatter
    wants_digest: bool = False  # a gather's
    digest: bytes = b""
    corruption: str | None = None  # what is wrong with the bytes, by their checksum

    def copies(self) -> list[Copy]:
        """Every row that moves, one by one, in this side's pool."""
        return copies(self.source.plan, self.source.addresses, self.segment)


def copies(plan: ChunkPlan, addresses_of: tuple[BlockAddresses, ...], segment: int) -> list[Copy]:
    """Every row of a segment, one by one."""
    rows: list[Copy] = []
    for piece in plan.pieces(segment):
        addresses = addresses_of[piece.block_idx]
        layer_offset = addresses.layer_offset_bytes(plan.blocks[piece.block_idx], piece.layer)
        slot_offset = piece.slot_offset_bytes
        for row_offset in addresses.row_offsets[piece.first_row : piece.end_row].tolist():
            rows.append((layer_offset + row_offset, slot_offset, addresses.row_bytes))
            slot_offset += addresses.row_bytes
    return rows


class Executor:
    """A pool of threads of one process. `report(operation, error, was_begun)` goes to its loop."""

    def __init__(
        self,
        process: Process,
        num_threads: int,
        faults: Faults,
        shape: DelayShape,
        move: Callable[[Operation], None],
        report: Callable[[Operation, str | None, bool], None],
        begun: Callable[[Operation], None],
        recheck: Callable[[Operation], str | None],
    ) -> None:
        self._process = process
        self._num_idle = num_threads
        self._faults = faults
        self._shape = shape
        self._move = move
        self._report = report
        self._begun = begun
        self._recheck = recheck
        self._queue: deque[Operation] = deque()

    def submit(self, operation: Operation) -> None:
        """Perform `operation` as soon as a thread is free."""
        self._queue.append(operation)
        self._take()

    def _take(self) -> None:
        while self._num_idle and self._queue:
            self._num_idle -= 1
            operation = self._queue.popleft()
            self._process.after(self._faults.delay_s(self._shape), lambda op=operation: self._begin(op))  # type: ignore[misc]

    def _begin(self, operation: Operation) -> None:
        self._begun(operation)
        if operation.cancel.is_set:
            self._end(operation, None, False)
        else:
            self._process.after(self._faults.delay_s(self._shape), lambda: self._run(operation))

    def _run(self, operation: Operation) -> None:
        error = "planned failure" if self._faults.is_due(self._faults.executor) else None
        if error is None:
            self._move(operation)
        delay_s = self._faults.delay_s(self._shape)
        self._process.after(delay_s, lambda: self._end(operation, error or self._recheck(operation), True))

    def _end(self, operation: Operation, error: str | None, was_begun: bool) -> None:
        self._num_idle += 1
        self._process.post(lambda: self._report(operation, error, was_begun))
        self._take()
