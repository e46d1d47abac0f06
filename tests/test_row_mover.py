"""Threads that move rows: every submitted move is reported once, whatever becomes of it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kvxfer.errors import LayoutError
from kvxfer.operations import CancelFlag, Moved
from kvxfer.row_mover import RowMover


class _Move:
    """Makes moves that wait for one gate and then do what their segment's number says."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[int] = []

    def __call__(self, segment: int) -> None:
        self.begun.append(segment)
        assert self.gate.wait(10.0)
        if segment == 1:
            raise LayoutError("row offsets: got 9, expected 0 to 8")
        if segment == 2:
            raise IndexError("a bug of ours")


@pytest.fixture
def move() -> _Move:
    return _Move()


@pytest.fixture
def mover(move: _Move) -> Iterator[RowMover]:
    found = RowMover(1, "test-mover")
    yield found
    move.gate.set()
    found.close()


def _submit(mover: RowMover, move: _Move, operation: int, segment: int = 0, cancel: CancelFlag | None = None) -> None:
    mover.submit(operation, segment, cancel or CancelFlag(), partial(move, segment))


def _wait(mover: RowMover, num_moves: int) -> list[Moved]:
    moved: list[Moved] = []
    deadline_s = time.monotonic() + 10.0
    while len(moved) < num_moves and time.monotonic() < deadline_s:
        if select.select([mover.fileno()], [], [], 0.1)[0]:
            moved += mover.poll()
    return moved


def test_moves_are_reported_once_through_a_descriptor(mover: RowMover, move: _Move) -> None:
    move.gate.set()
    for operation in range(3):
        _submit(mover, move, operation)
    moved = _wait(mover, 3)
    assert [(each.operation, each.error, each.was_begun) for each in moved] == [(i, None, True) for i in range(3)]
    assert all(each.busy_s >= 0 for each in moved)
    assert mover.poll() == []


def test_a_cancelled_move_never_begins(mover: RowMover, move: _Move) -> None:
    """The flag is looked at when a thread is free, not when the move was submitted."""
    cancel = CancelFlag()
    _submit(mover, move, 1)
    _submit(mover, move, 2, segment=7, cancel=cancel)
    cancel.is_set = True
    move.gate.set()
    assert [(each.operation, each.was_begun) for each in _wait(mover, 2)] == [(1, True), (2, False)]
    assert 7 not in move.begun


@pytest.mark.parametrize(("segment", "error"), [(1, "row offsets"), (2, "IndexError: a bug of ours")])
def test_whatever_a_move_raises_ends_it(mover: RowMover, move: _Move, segment: int, error: str) -> None:
    """A move whose end were lost would keep its transfer, its slot and the worker's pages for ever."""
    move.gate.set()
    _submit(mover, move, 5, segment=segment)
    (moved,) = _wait(mover, 1)
    assert moved.was_begun
    assert moved.error is not None
    assert f"segment {segment}: " in moved.error
    assert error in moved.error


def test_parts_of_a_move_are_reported_together(mover: RowMover, move: _Move) -> None:
    move.gate.set()
    for operation, segments in ((1, [0, 3, 4]), (2, [0, 1, 5])):
        mover.submit_all(operation, CancelFlag(), [partial(move, segment) for segment in segments])
    ends = {moved.operation: moved for moved in _wait(mover, 2)}
    assert (ends[1].error, ends[1].was_begun) == (None, True)
    assert "row offsets: got 9" in str(ends[2].error)
    assert sorted(move.begun) == [0, 0, 1, 3, 4, 5]
    assert mover.poll() == []


def test_parts_that_were_cancelled_in_time_never_begin(mover: RowMover, move: _Move) -> None:
    cancel = CancelFlag()
    cancel.is_set = True
    mover.submit_all(1, cancel, [partial(move, 0), partial(move, 3)])
    (moved,) = _wait(mover, 1)
    assert (moved.error, moved.was_begun, move.begun) == (None, False, [])


def test_closing_waits_for_the_move_under_way_and_drops_the_rest(move: _Move) -> None:
    """Memory is unmapped after `close()`: no thread may touch it by then."""
    num_fds = len(os.listdir("/proc/self/fd"))
    num_threads = threading.active_count()
    mover = RowMover(1, "test-mover")
    _submit(mover, move, 1)
    _submit(mover, move, 2, segment=9)
    deadline_s = time.monotonic() + 10.0
    while not move.begun and time.monotonic() < deadline_s:
        time.sleep(0.001)
    threading.Timer(0.05, move.gate.set).start()
    mover.close()
    assert move.gate.is_set()
    assert 9 not in move.begun
    mover.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds
    deadline_s = time.monotonic() + 10.0
    while threading.active_count() > num_threads and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert threading.active_count() == num_threads
