"""Control connections between agents: ordered both ways, and what breaks them.

A reset loses the newest messages of both directions, unseen by either side. As faults beyond what a connection may
do, a single message is lost, overtakes those before it, or comes twice: order is what the cores live from, never what
their safety rests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvxfer.control.messages import (
    Credits,
    Finished,
    LegStatus,
    Ping,
    Pulled,
    Query,
    Quiesced,
    QuiescedAck,
    Segment,
    Want,
)
from tests.simulation import pairing
from tests.simulation.choices import DelayShape
from tests.simulation.clock import Clock

if TYPE_CHECKING:
    from tests.simulation.decode_agent import SimDecode
    from tests.simulation.prefill_agent import SimPrefill
    from tests.simulation.schedule import Faults

M = TypeVar("M")

RECOVERED = (
    Ping,
    Credits,
    Query,
    QuiescedAck,
    Pulled,
    Want,
    Segment,
    Finished,
    Quiesced,
    LegStatus,
    pairing.Rotated,
    pairing.RotationTaken,
)
"""What may be lost without harm to any transfer, because it is said again."""


@dataclass(slots=True, eq=False)
class _Sent(Generic[M]):
    message: M
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class Pipe(Generic[M]):
    """One direction of a connection."""

    clock: Clock
    faults: Faults
    shape: DelayShape
    deliver: Callable[[M], None]
    on_fault: Callable[[], None]
    last_at: float = 0.0
    under_way: list[_Sent[M]] = field(default_factory=list)

    def send(self, message: M) -> None:
        """Deliver `message` after any delay, behind those sent before."""
        sent = _Sent(message, isinstance(message, RECOVERED) and self.faults.is_due(self._lose(message)))
        self.under_way.append(sent)
        at = self.clock.now + self.faults.delay_s(self.shape)
        if at < self.last_at and self.faults.is_due(self.faults.overtake):
            self.on_fault()
        else:
            self.last_at = at = max(at, self.last_at)
        self.faults.late_until = max(self.faults.late_until, at - 1.0)
        self.clock.after(at - self.clock.now, lambda: self._arrive(sent))
        if self.faults.is_due(self.faults.repeat):
            self.on_fault()
            self.clock.after(at - self.clock.now + self.faults.delay_s(self.shape), lambda: self.deliver(message))

    def _lose(self, message: M) -> int:
        """The chance that it is lost. Rotations are rare, so theirs is large."""
        return min(500, 20 * self.faults.lose) if isinstance(message, pairing.Rotated) else self.faults.lose

    def lose_newest(self, num_kept: int) -> None:
        """Lose all that is under way but the oldest `num_kept`."""
        for sent in self.under_way[num_kept:]:
            sent.is_lost = True

    def _arrive(self, sent: _Sent[M]) -> None:
        self.under_way.remove(sent)
        if not sent.is_lost:
            self.deliver(sent.message)


class Link:
    """One connection of a decode agent to a prefill agent. `to_prefill` and `to_decode` carry messages."""

    def __init__(self, prefill: SimPrefill, decode: SimDecode, faults: Faults, shape: DelayShape) -> None:
        self.number = decode.num_links
        self.prefill = prefill
        self.decode = decode
        self.is_closed = False

        def taint() -> None:
            prefill.world.taint_pair(prefill.incarnation, decode.incarnation)

        def to_prefill(message: object) -> None:
            prefill.post(lambda: prefill.received(self, message))

        def to_decode(message: object) -> None:
            if not self.is_closed:
                decode.post(lambda: decode.received(self, message))

        self.to_prefill: Pipe[object] = Pipe(prefill.clock, faults, shape, to_prefill, taint)
        self.to_decode: Pipe[object] = Pipe(prefill.clock, faults, shape, to_decode, taint)

    def reset(self, num_kept: int) -> None:
        """Lose the newest messages of both directions."""
        world = self.prefill.world
        world.taint_pair(self.prefill.incarnation, self.decode.incarnation)
        self.to_prefill.lose_newest(num_kept)
        self.to_decode.lose_newest(num_kept)
