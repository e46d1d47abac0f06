"""Simulated time: events in the order of their instants, and processes that may be paused or killed between them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

Step = Callable[[], None]


def instant(at_s: float) -> float:
    """Whole microseconds: the same instant must come out the same from whenever it was asked for."""
    return round(at_s, 6)


class Clock:
    """Events that are still to come. Those of the same instant happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_steps = 0
        self._events: list[tuple[float, int, Process | None, Step]] = []
        self._num_events = 0

    def after(self, delay_s: float, step: Step, process: Process | None = None) -> None:
        """Do `step` in `delay_s`: in `process`, later if that is paused then, never if it is dead."""
        self._num_events += 1
        heapq.heappush(self._events, (instant(self.now + delay_s), self._num_events, process, step))

    @property
    def is_instant_over(self) -> bool:
        """Whether all that happens at this instant has happened."""
        return self._events[0][0] > self.now

    def step(self) -> None:
        """Let the next event happen."""
        self.now, _, process, step = heapq.heappop(self._events)
        self.num_steps += 1
        if process is None:
            step()
        elif process.is_dead:
            return
        elif process.paused_until > self.now:
            self.after(process.paused_until - self.now, step, process)
        else:
            step()


class Process(ABC):
    """Something that can stop at any moment: for a while, or for ever."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.is_dead = False
        self.paused_until = 0.0
        self._inbox: deque[Step] = deque()
        self._turn_is_due = False

    @property
    def is_paused(self) -> bool:
        return self.paused_until > self.clock.now

    def after(self, delay_s: float, step: Step) -> None:
        """Do `step` in `delay_s`, later if the process is paused then, never if it is dead."""
        self.clock.after(delay_s, step, self)

    def post(self, step: Step) -> None:
        """Put something into the inbox of the loop."""
        if not self.is_dead:
            self._inbox.append(step)
            self.wake()

    def wake(self) -> None:
        """Give the loop a turn."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self.clock.after(0.0, self._begin_turn, self)

    def pause(self, pause_s: float) -> None:
        """Stop every thread of the process."""
        self.paused_until = max(self.paused_until, instant(self.clock.now + pause_s))

    @abstractmethod
    def turn(self) -> None:
        """One round of the loop."""

    def _begin_turn(self) -> None:
        self._turn_is_due = False
        self.turn()
