"""A thread that looks at the words of a ring in place of the agent's loop, which sleeps, and wakes it.

It does nothing else: what a word means is for the loop to see. While the loop is in a turn the thread sleeps: one that
waits for the interpreter makes every call slower in which the loop lets go of it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from kvxfer.streams.ring import Ring

_FIRST_NAP_S: Final = 40e-6
_MAX_NAP_S: Final = 1e-3
_MAX_LAZY_NAP_S: Final = 25e-3
_LOOKS_PER_NAP: Final = 20  # without news, before naps get longer
_MAX_DOUBLINGS: Final = 10  # of naps, however long there is no news
_SET_TIMER_SLACK: Final = 29  # PR_SET_TIMERSLACK: for the thread that calls it, in nanoseconds
_libc = ctypes.CDLL(None)


class Awaited(NamedTuple):
    """Which change of a word the loop waits for: any of those that are not None."""

    done: int | None = None
    """The entry that ends next."""
    enqueued: int | None = None
    """As many entries are enqueued."""
    timeline: int | None = None
    """The worker's stream has come so far."""
    is_urgent: bool = False
    """Whether a transfer waits. Not urgent are entries that a worker was asked for in vain and has not enqueued yet: it
    may be silent for hours, and only its stream would wait for them."""

    def has_come(self, ring: Ring) -> bool:
        """Whether one of them is there."""
        return (
            (self.done is not None and ring.is_done(self.done))
            or (self.enqueued is not None and ring.num_enqueued >= self.enqueued)
            or (self.timeline is not None and ring.timeline >= self.timeline)
        )


class RingWatch:
    """Calls `wake` in a thread of its own, once for each call of `wait_for`. `ring` must outlive `close()`."""

    def __init__(self, ring: Ring, wake: Callable[[], None]) -> None:
        self._ring = ring
        self._wake = wake
        self._awaited: Awaited | None = None
        self._bell = threading.Lock()  # let go of to wake the thread, which takes it
        self._is_asleep = False  # until the bell rings, or for long
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-ring-watch", daemon=True)
        self._thread.start()

    def wait_for(self, awaited: Awaited) -> None:
        """The loop is about to sleep: wake it when this has come."""
        self._awaited = awaited
        if self._is_asleep:
            self._ring_bell()

    def rest(self) -> None:
        """The loop is awake, or nothing is awaited any more."""
        self._awaited = None

    def close(self) -> None:
        """End the thread. Calling it again does nothing."""
        self._is_closed = True
        self._ring_bell()
        self._thread.join()

    def _ring_bell(self) -> None:
        if self._bell.locked():  # by the thread, and nobody else lets go of it
            self._bell.release()

    def _run(self) -> None:
        _libc.prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0)  # naps would last twice as long
        told: Awaited | None = None  # has come, and the loop was woken for it
        last: Awaited | None = None  # looked at last
        num_looks = 0  # at that, in vain
        while not self._is_closed:
            awaited = self._awaited
            if awaited is None or awaited is told:
                self._sleep(awaited, None)
                continue
            if awaited.has_come(self._ring):
                told = awaited
                self._wake()
                continue
            num_looks = num_looks + 1 if awaited == last else 0
            last = awaited
            self._sleep(awaited, _nap_s(num_looks, is_urgent=awaited.is_urgent))

    def _sleep(self, awaited: Awaited | None, nap_s: float | None) -> None:
        """Until the bell rings, for at most `nap_s`. In the shortest nap it is not rung."""
        if nap_s != _FIRST_NAP_S:
            self._is_asleep = True  # said first, then looked: `wait_for` does it the other way round
        if self._awaited is awaited and not self._is_closed:
            self._bell.acquire(timeout=-1 if nap_s is None else nap_s)
        self._is_asleep = False


def _nap_s(num_looks: int, *, is_urgent: bool) -> float:
    """How long to sleep after so many looks in vain."""
    nap_s: float = _FIRST_NAP_S * 2 ** min(num_looks // _LOOKS_PER_NAP, _MAX_DOUBLINGS)
    return min(nap_s, _MAX_NAP_S if is_urgent else _MAX_LAZY_NAP_S)
