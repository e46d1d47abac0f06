"""Entries that are bound to slots: what lets a copy engine, in place of programs, take gathered segments there.

A copy engine is told where to copy when the copy is enqueued, long before anybody knows which segment an entry gets. So
an owner that copies that way says that entry `n` fills slot `n % num_slots` and no other. Its stream packs the segment
in memory of its own, `MemoryIndex.STAGING`, and copies all of that into the entry's slot whatever the order was: who
gives orders must know that an entry which is skipped writes its slot as well, and lets a slot that may be in use keep
what it holds by an order that copies it to `STAGING` first.

Three words of a ring's header: how many slots there are and of how many bytes, which the agent says where entries may
be bound, and whether they are, which the owner says before it enqueues the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvxfer.ownership import Int64Array
from kvxfer.streams.ring import DST_COLUMN, LINEAR, SPAN_WORDS, MemoryIndex, Ring, Span
from kvxfer.streams.spans import MAX_WORD_BYTES, Order

_NUM_SLOTS_WORD: Final = 32  # each in a cache line of its own, behind those of `Ring`
_SLOT_BYTES_WORD: Final = 40
_IS_BOUND_WORD: Final = 48
MAX_BOUND_BYTES: Final = 32 << 20
"""Of a slot: each stream of an owner has as much memory. Larger ones are few, and programs fill them."""
TO_STAGING: Final = (DST_COLUMN, MemoryIndex.STAGING - MemoryIndex.SLOTS)
"""What is added to a column of spans that lead to the first slot, so that they lead to `STAGING`."""


@dataclass(frozen=True, slots=True)
class BoundSlots:
    """Slots to which entries are bound, in turn."""

    num_slots: int
    slot_bytes: int

    def slot_of(self, number: int) -> int:
        """The slot of entry `number`."""
        return number % self.num_slots

    def keep(self, slot: int, num_bytes: int) -> memoryview:
        """The span that copies the first `num_bytes` of `slot` to `STAGING`, as in an `Order`."""
        first_byte = slot * self.slot_bytes
        bits = num_bytes | first_byte | MAX_WORD_BYTES
        span = Span(num_bytes, 1, bits & -bits, MemoryIndex.SLOTS, first_byte, LINEAR, MemoryIndex.STAGING, 0, LINEAR)
        words = np.zeros(SPAN_WORDS, dtype=np.int64)
        words[: len(span)] = span
        return words.data

    def go_on(self, slot: int, order: Order) -> Order:
        """The order that fills `slot` behind what an entry before has put there, and keeps that."""
        kept, words = self.keep(slot, order.span_words[DST_COLUMN + 1]), np.array(order.span_words)
        column, number = TO_STAGING
        words[column::SPAN_WORDS] += number
        return Order(np.concatenate((kept, words)).data, order.offsets)

    def fit(self, num_bytes: int) -> bool:
        """Whether they fit into memory of `num_bytes`."""
        return self.num_slots > 0 and self.slot_bytes > 0 and self.num_slots * self.slot_bytes <= num_bytes


def offer_slots(ring: Ring, num_slots: int, slot_bytes: int) -> None:
    """The agent: entries may be bound to its slots."""
    words = _words(ring)
    words[_NUM_SLOTS_WORD], words[_SLOT_BYTES_WORD] = num_slots, slot_bytes


def bind_entries(ring: Ring, num_bytes: int) -> BoundSlots | None:
    """The owner: bind all entries, none of which is enqueued yet, to slots in memory of `num_bytes`. None, and nothing
    is bound, where the agent has not offered slots, or they do not fit or are too large."""
    words = _words(ring)
    offered = BoundSlots(int(words[_NUM_SLOTS_WORD]), int(words[_SLOT_BYTES_WORD]))
    if not offered.fit(num_bytes) or offered.slot_bytes > MAX_BOUND_BYTES:
        return None
    words[_IS_BOUND_WORD] = 1
    return offered


def bound_slots(ring: Ring) -> BoundSlots | None:
    """The agent, once an entry is enqueued: what entries are bound to; None for nothing."""
    words = _words(ring)
    if not words[_IS_BOUND_WORD]:
        return None
    return BoundSlots(int(words[_NUM_SLOTS_WORD]), int(words[_SLOT_BYTES_WORD]))


def _words(ring: Ring) -> Int64Array:
    return ring.memory.array[: 64 * 8].view(np.int64)
