"""Whether an agent's slots can carry the rate of its paths, where it has to wait for turns on the GPU that moves rows.

All that has a slot is given to the GPU at once, and is moved when this process's turn comes. So no more than the bytes
of the slots is moved in the time of a turn, whatever else is fast.
"""

from __future__ import annotations

import logging
import math

_GROWTH = 1.5
"""Beside the slots that wait for a turn there are those of the turn before, which are on the wire."""


class TurnWatch:
    """Of one agent, which has `num_slots` of `slot_bytes`."""

    def __init__(self, num_slots: int, slot_bytes: int, log: logging.Logger) -> None:
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._log = log
        self._has_warned = False
        self.num_wanted = 0
        """Slots that would carry the fastest path's rate; 0 where there are enough, or nothing is known."""

    def look(self, turn_s: float | None, bytes_per_s: float) -> None:
        """`turn_s`: what was measured last, None where this agent waits for no turns. `bytes_per_s`: the measured rate
        of the fastest path, 0 without one. Says in the log once what is missing."""
        held_bytes = self._num_slots * self._slot_bytes
        if turn_s is None or held_bytes >= bytes_per_s * turn_s:
            self.num_wanted = 0
            return
        self.num_wanted = math.ceil(_GROWTH * bytes_per_s * turn_s / self._slot_bytes)
        if self._has_warned:
            return
        self._has_warned = True
        self._log.warning(
            "slots.num_slots: got %d, expected %d: this agent has a turn on the GPU every %.2f ms, so that its slots "
            "carry %.1f GB/s, and the path to a peer %.1f GB/s",
            self._num_slots,
            self.num_wanted,
            turn_s * 1e3,
            held_bytes / turn_s / 1e9,
            bytes_per_s / 1e9,
        )
