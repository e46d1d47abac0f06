"""A thread that looks at the words of a ring in place of the agent's loop, which sleeps, and wakes it.

It does nothing else: what a word means is for the loop to see. So the loop holds no lock, and a look costs the
interpreter that all threads of an agent share as little as it can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvxfer.streams.ring import Ring

_FIRST_NAP_S: Final = 50e-6
_MAX_NAP_S: Final = 1e-3
_MAX_LAZY_NAP_S: Final = 25e-3
_LOOKS_PER_NAP: Final = 20  # without news, before naps get longer
_LOOKS_AFTER_NEWS: Final = 5  # before it sleeps until it is told what to wait for
_MAX_DOUBLINGS: Final = 10  # of naps, however long there is no news


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
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
    """Calls `wake` in a thread of its own, once for each thing that is awaited. `ring` must outlive `close()`."""

    def __init__(self, ring: Ring, wake: Callable[[], None]) -> None:
        self._ring = ring
        self._wake = wake
        self._awaited: Awaited | None = None
        self._news = threading.Event()
        self._is_asleep = False  # until there is news, or for long: it must be told
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-ring-watch", daemon=True)
        self._thread.start()

    def wait_for(self, awaited: Awaited | None) -> None:
        """Wake the loop when this has come, in place of what was awaited before."""
        self._awaited = awaited
        if self._is_asleep:
            self._news.set()

    def close(self) -> None:
        """End the thread. Calling it again does nothing."""
        self._is_closed = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        told: Awaited | None = None  # has come, and the loop was woken for it
        last: Awaited | None = None  # looked at last
        num_idle = 0
        while not self._is_closed:
            awaited = self._awaited
            num_idle = num_idle + 1 if awaited is last else 0
            last = awaited
            if awaited is None or awaited is told:
                # A loop that is at work will soon wait again, and to be woken by it costs more than some naps.
                nap_s, is_over = _FIRST_NAP_S if num_idle < _LOOKS_AFTER_NEWS else _MAX_NAP_S, True
            elif awaited.has_come(self._ring):
                told = awaited
                self._wake()
                continue
            else:
                nap_s, is_over = _nap_s(num_idle, is_urgent=awaited.is_urgent), False
            if nap_s <= _FIRST_NAP_S:
                time.sleep(nap_s)
            else:
                self._sleep(awaited, None if is_over else nap_s)

    def _sleep(self, awaited: Awaited | None, timeout_s: float | None) -> None:
        """Sleep until something else than `awaited` is awaited, for at most `timeout_s`."""
        self._is_asleep = True  # said first, then looked: `wait_for` does it the other way round
        if self._awaited is awaited and not self._is_closed:
            self._news.wait(timeout_s)
        self._is_asleep = False
        self._news.clear()


def _nap_s(num_idle: int, *, is_urgent: bool) -> float:
    """How long to sleep after so many looks without news."""
    nap_s: float = _FIRST_NAP_S * 2 ** min(num_idle // _LOOKS_PER_NAP, _MAX_DOUBLINGS)
    return min(nap_s, _MAX_NAP_S if is_urgent else _MAX_LAZY_NAP_S)
