"""Every random decision of a schedule comes from here, so that a schedule is a list of numbers.

A schedule is replayed by its list, and shrunk by making the list shorter and its numbers smaller: 0 always stands for
the harmless choice (no delay, no fault, the first of several), and a list that has run out goes on with zeros.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SHORT_UNIT_S = 0.01
LONG_UNIT_S = 0.5


@dataclass(frozen=True, slots=True)
class DelayShape:
    """How heavy the tail of a kind of delay is: per mille that are short, middling, and longer than a deadline."""

    short: int
    middle: int
    long: int


CALM = DelayShape(short=300, middle=0, long=0)
UNEVEN = DelayShape(short=400, middle=100, long=0)
HEAVY = DelayShape(short=400, middle=100, long=40)
SHAPES = (CALM, UNEVEN, HEAVY)


class Choices:
    """Decisions drawn from a seed, or read from the record of an earlier schedule."""

    def __init__(self, seed: int | None, recorded: Sequence[int] = ()) -> None:
        """Without a seed the decisions are those `recorded`, then zeros."""
        self._random = random.Random(seed).random if seed is not None else None
        self._recorded = recorded
        self.record: list[int] = []

    def pick(self, num: int) -> int:
        """A number in `[0, num)`."""
        if self._random is not None:
            value = int(self._random() * num)
        else:
            position = len(self.record)
            value = self._recorded[position] % num if position < len(self._recorded) else 0
        self.record.append(value)
        return value

    def chance(self, per_mille: int) -> bool:
        """True in `per_mille` of a thousand; nothing is drawn where it cannot be."""
        return per_mille > 0 and self.pick(1000) >= 1000 - per_mille

    def one_of(self, items: Sequence[T]) -> T:
        """One of `items`, the first as the harmless one."""
        return items[self.pick(len(items))]

    def delay_s(self, shape: DelayShape) -> float:
        """None, 0.01 to 0.2 s, 0.25 to 2.5 s, or 4 to 12 s."""
        drawn = self.pick(1000)
        if drawn >= 1000 - shape.long:
            return 4.0 + self.pick(17) * LONG_UNIT_S
        if drawn >= 1000 - shape.long - shape.middle:
            return 0.25 + self.pick(10) * LONG_UNIT_S / 2
        if drawn >= 1000 - shape.long - shape.middle - shape.short:
            return SHORT_UNIT_S * (1 + self.pick(20))
        return 0.0
