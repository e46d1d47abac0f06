"""Slots: registered memory of an agent, cut into equal parts, and the one state that each part is in.

Pure bookkeeping, used by both sides. The memory belongs to the agent; a slot's index is its place in it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping

from kvxfer.errors import ContractError


class SlotState(enum.StrEnum):
    """What a slot is used for right now."""

    FREE = "free"
    # the sending side
    FILLING = "filling"  # leased; its gather was emitted and has not ended
    READY = "ready"  # holds packed rows, waits for credits
    IN_FLIGHT = "in_flight"  # at least one write reads it
    # the landing side
    CREDITED = "credited"  # a peer may write it
    SCATTERING = "scattering"  # filled; its scatter was emitted and has not ended
    # both
    QUARANTINED = "quarantined"  # a write with an unknown end may still use it


SENDER_MOVES: Mapping[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.FILLING}),
    SlotState.FILLING: frozenset({SlotState.READY, SlotState.FREE}),
    SlotState.READY: frozenset({SlotState.IN_FLIGHT, SlotState.FREE}),
    SlotState.IN_FLIGHT: frozenset({SlotState.FREE, SlotState.QUARANTINED}),
    SlotState.QUARANTINED: frozenset({SlotState.FREE}),
}
LANDING_MOVES: Mapping[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.CREDITED}),
    SlotState.CREDITED: frozenset({SlotState.SCATTERING, SlotState.FREE, SlotState.QUARANTINED}),
    SlotState.SCATTERING: frozenset({SlotState.FREE}),
    SlotState.QUARANTINED: frozenset({SlotState.FREE}),
}


class SlotTable:
    """The state of every slot, and who a quarantined one waits for.

    A move that the table does not allow is a bug of ours and raises `AssertionError`.
    """

    in_turn = False
    """Whether slots are taken in the order of their numbers, round and round, because whoever fills them does so: one
    that is passed over costs time. So the next one is waited for, unless it is quarantined or slow."""

    def __init__(self, num_slots: int, moves: Mapping[SlotState, frozenset[SlotState]]) -> None:
        if num_slots < 1:
            raise ContractError(f"num_slots: got {num_slots}, expected at least 1")
        self.num_slots = num_slots
        self._moves = moves
        self._states = [SlotState.FREE] * num_slots
        self._free = deque(range(num_slots))
        self._counts = dict.fromkeys(SlotState, 0) | {SlotState.FREE: num_slots}
        self._quarantine: dict[int, str] = {}
        self._next = 0  # in turn
        self._num_taken = [0] * num_slots
        self._num_taken_before = list(self._num_taken)  # at the last `mark_slow`
        self._slow: set[int] = set()

    def state(self, slot: int) -> SlotState:
        """The state of `slot`."""
        return self._states[slot]

    def count(self, state: SlotState) -> int:
        """How many slots are in `state`."""
        return self._counts[state]

    def counts(self) -> dict[str, int]:
        """How many slots are in each state that a slot of this side can be in. May be called from another thread."""
        return {state.value: self._counts[state] for state in self._moves}

    @property
    def num_free(self) -> int:
        return self._counts[SlotState.FREE]

    def share(self, num_peers: int) -> int:
        """How many slots one peer may use while `num_peers` are there: one that never gives back leaves some."""
        return self.num_slots if num_peers <= 1 else max(1, self.num_slots // 2)

    def has_room(self, num_held: int, num_peers: int) -> bool:
        """Whether a peer that uses `num_held` slots may have another one of those that are free. The last one is for
        a peer that uses none and may have come late."""
        if num_held and num_held >= self.share(num_peers):
            return False
        num_reserved = 1 if num_held and self.num_slots > 2 else 0
        return self._counts[SlotState.FREE] > num_reserved

    def next_free(self) -> int | None:
        """The slot that `take` would move: the one that has been free for longest, or whose turn it is. None where
        none is free, or the next one in turn will soon be."""
        if not self.in_turn:
            return self._free[0] if self._free else None
        for step in range(self.num_slots if self._free else 0):
            slot = (self._next + step) % self.num_slots
            state = self._states[slot]
            if state is SlotState.FREE:
                return slot
            if state is not SlotState.QUARANTINED and slot not in self._slow:
                return None
        return None

    def take(self, state: SlotState) -> int | None:
        """Move the slot that `next_free` names to `state`."""
        slot = self.next_free()
        if slot is None:
            return None
        self._free.remove(slot)
        self._next = slot + 1
        self._num_taken[slot] += 1
        self.move(slot, state)
        return slot

    def mark_slow(self) -> None:
        """To be called now and then: slots that have been in use ever since the last call are not waited for."""
        self._slow = {
            slot
            for slot, state in enumerate(self._states)
            if state is not SlotState.FREE and self._num_taken[slot] == self._num_taken_before[slot]
        }
        self._num_taken_before = list(self._num_taken)

    def move(self, slot: int, state: SlotState) -> None:
        """Move `slot` on."""
        old = self._states[slot]
        assert state in self._moves[old], f"slot {slot}: {old} -> {state} is no legal move"
        self._states[slot] = state
        self._counts[old] -= 1
        self._counts[state] += 1
        if state is SlotState.FREE:
            self._free.append(slot)

    def quarantine(self, slot: int, peer: str) -> None:
        """Set `slot` aside: a write that `peer` takes part in has an unknown end."""
        self.move(slot, SlotState.QUARANTINED)
        self._quarantine[slot] = peer

    def num_quarantined(self, peer: str) -> int:
        """How many slots wait for `peer`."""
        if not self._quarantine:
            return 0
        return sum(1 for owner in self._quarantine.values() if owner == peer)

    def release_quarantine(self) -> int:
        """Free every quarantined slot: no engine object is left that could still use one. Returns how many."""
        slots = list(self._quarantine)
        self._quarantine.clear()
        for slot in slots:
            self.move(slot, SlotState.FREE)
        return len(slots)
