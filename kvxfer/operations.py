"""What both cores hand to the executors that touch a worker's pool, and what these give back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvxfer.addresses import BlockAddresses
from kvxfer.errors import IntegrityError
from kvxfer.segments import ChunkPlan


@dataclass(slots=True)
class CancelFlag:
    """Set once when nothing of its owner may start any more; executors look at it just before they begin."""

    is_set: bool = False


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SegmentSource:
    """A chunk of one leg as one side's row mover sees it: its plan and where its rows lie in the worker's pool.

    One object a chunk: an executor may keep what it has worked out for it as long as the object lives.
    """

    plan: ChunkPlan
    addresses: tuple[BlockAddresses, ...]


@dataclass(frozen=True, slots=True)
class RowSum:
    """Lets a stream sum a segment's bytes while it moves them (`kvxfer.row_sums`).

    `judge` is called with the sum: what it returns goes into `Moved.result`, and with an `IntegrityError` the move has
    failed. A scatter moves no row unless the segment's `num_bytes` have the sum `expected`.
    """

    judge: Callable[[int], object]
    num_bytes: int
    expected: int = 0


class Move(NamedTuple):
    """One segment of a chunk that is to be moved: out of the worker's pool into a slot, or the other way round."""

    operation: int
    source: SegmentSource
    segment: int
    cancel: CancelFlag
    row_sum: RowSum | None = None  # only for an executor that sums gathers or checks scatters


@dataclass(frozen=True, slots=True, eq=False)
class PeerRows:
    """The rows of a chunk in a peer's pool of `num_bytes`, which whoever moves rows has mapped under `index`."""

    index: int
    num_bytes: int
    addresses: tuple[BlockAddresses, ...]


class Moved(NamedTuple):
    """A move has ended. `was_begun` is False where its cancel flag was set in time."""

    operation: int
    busy_s: float
    error: str | None
    was_begun: bool
    result: object = None  # what was found out about the rows, where somebody asked for it
    is_corrupt: bool = False  # the bytes to be moved were not those announced


def failed(operation: int, segment: int, problem: BaseException) -> Moved:
    """The end of a move that has raised `problem`."""
    error = f"segment {segment}: {type(problem).__name__}: {problem}"
    return Moved(operation, 0.0, error, True, is_corrupt=isinstance(problem, IntegrityError))


class RowExecutor(Protocol):
    """Moves rows between one worker's pool and the agent's slots: threads on a mapped pool, or a stream that belongs
    to whoever may touch the pool. Each move ends in one `Moved`, of `look()` or of the agent's `RowMover`."""

    @property
    def timeline(self) -> int:
        """How far the worker's stream has come; 0 for a pool without a timeline."""
        ...

    @property
    def has_timeline(self) -> bool:
        """Whether the worker can say when its rows are written."""
        ...

    @property
    def fills_in_turn(self) -> bool:
        """Whether slots should be given to gathers in the order of their numbers, round and round."""
        ...

    @property
    def sums_gathers(self) -> bool:
        """Whether gathers may have a `RowSum`."""
        ...

    @property
    def checks_scatters(self) -> bool:
        """Whether scatters may have a `RowSum`."""
        ...

    @property
    def may_still_move(self) -> bool:
        """After `stop()`: whether something may still write into slots, because the worker left without having ended
        what it was given."""
        ...

    @property
    def may_have_spoilt(self) -> bool:
        """Whether slots may hold something else by now than what gathers have put there, because the worker has ended
        its stream. To be looked at after a slot was read: what was read before is right then."""
        ...

    def hold(self, is_held: bool) -> None:
        """Let nothing begin while `is_held`: the slots have moved, and the worker is to learn where."""
        ...

    def gather(self, move: Move, slot: int, look: Callable[[], object] | None) -> None:
        """Pack a segment into `slot`, then call `look` in a thread: what it returns goes into `Moved.result`."""
        ...

    def scatter(self, move: Move, slot: int, look: Callable[[], object] | None) -> None:
        """Put the segment that lies in `slot` into its rows, after `look`, called in a thread, has raised nothing."""
        ...

    def prepare_pull(self, source: SegmentSource, src: PeerRows) -> None:
        """A `pull` of `source` from there will follow, or nothing: do now what it would take time for. Reads no row."""
        ...

    def pull(self, move: Move, src: PeerRows, look: Callable[[], object]) -> None:
        """Copy a whole chunk, whatever segment `move` names, out of a peer's pool into its rows, then call `look`, in
        any thread, which takes no time: what that raises makes the rows worthless."""
        ...

    def look(self) -> list[Moved]:
        """Once a turn of the agent's loop, which ends with `expect`: hand out the moves that have ended and that its
        `RowMover` does not report. Wakes the agent, by that, when there is something to look at."""
        ...

    def expect(self, num_moves: int, ready: int) -> None:
        """So many moves are certain to follow those that were given, unless this is called again with fewer. Wake the
        agent once the timeline has reached `ready`, 0 for nothing."""
        ...

    def stop(self, error: str) -> None:
        """The worker is lost: what cannot go on without it ends with `error`."""
        ...

    def close(self) -> None:
        """Give everything back; no move is under way. Calling it again does nothing."""
        ...


class MoveReports(Protocol):
    """Threads for work beside the stream, and where ends go: the agent's `RowMover`."""

    def call(self, work: Callable[[], object]) -> Future[object]:
        """Call `work` in a thread."""
        ...

    def report(self, moved: Moved | None) -> None:
        """Hand `moved` to the agent; None only wakes it."""
        ...
