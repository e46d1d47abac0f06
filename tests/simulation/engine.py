"""Transfer engines: a write is emitted, posted, and lands after any delay.

It reads its source when it lands. Neither a pause nor the death of its sender nor a dropped peer stops it: only the
replacement of an engine object does (`rotate`), of the sender's or of the target's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.prefill.actions import Write
from kvxfer.transports.base import Outcome
from tests.simulation.choices import DelayShape
from tests.simulation.clock import Clock

if TYPE_CHECKING:
    from tests.simulation.decode_agent import SimDecode
    from tests.simulation.prefill_agent import SimPrefill
    from tests.simulation.schedule import Faults

LegId = tuple[str, str, str, int]  # prefill incarnation, decode incarnation, transfer, generation


class WriteState(enum.Enum):
    """Where a write is. In the first three it can still land."""

    EMITTED = "emitted"
    CHECKED = "checked"  # the cancel flag was looked at, the engine has not got it yet
    POSTED = "posted"
    LANDED = "landed"
    DEAD = "dead"  # was never posted, or was cut


@dataclass(slots=True, eq=False)
class SimWrite:
    """One write. `epoch` is the target's engine object that it was posted to."""

    action: Write
    leg: LegId
    sender: SimPrefill
    target: SimDecode
    state: WriteState = WriteState.EMITTED
    epoch: int = 0
    is_reported: bool = False  # its end lies in the sender's inbox
    is_ended: bool = False  # the core knows of it
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def can_land(self) -> bool:
        """Whether it may still read its source and write its target, seen by one who knows everything."""
        if self.state in (WriteState.LANDED, WriteState.DEAD) or self.target.is_dead:
            return False
        if self.state is WriteState.POSTED:
            return self.epoch == self.target.epoch
        if self.sender.is_dead:
            return False
        if self.state is WriteState.CHECKED:
            return self.epoch == self.target.epoch
        return not self.action.cancel.is_set and self.sender.epoch_of(self.leg[1]) == self.target.epoch


class Engines:
    """All writes of a world that have not landed yet."""

    def __init__(self, clock: Clock, faults: Faults, wire: DelayShape) -> None:
        self._clock = clock
        self._faults = faults
        self._wire = wire
        self.writes: list[SimWrite] = []

    def emitted(self, write: SimWrite) -> None:
        """The core has asked for a write."""
        self.writes = [each for each in self.writes if each.can_land or not each.is_ended]
        self.writes.append(write)

    def post(self, write: SimWrite) -> None:
        """Hand a write to the engine."""
        write.state = WriteState.POSTED
        choices = self._faults.choices
        delay_s = self._faults.delay_s(self._wire)
        if write.epoch != write.target.epoch:
            write.state = WriteState.DEAD
            write.sender.world.taint_transfer(write.action.notice.transfer)
            outcome = choices.one_of((Outcome.FAILED, Outcome.UNKNOWN, Outcome.DONE))  # into memory that was given up
            self._clock.after(delay_s, lambda: self._report(write, outcome))
            return
        self._clock.after(delay_s, lambda: self._land(write))
        if self._faults.is_due(self._faults.engine):
            write.sender.world.taint_transfer(write.action.notice.transfer)
            outcome = choices.one_of((Outcome.UNKNOWN, Outcome.FAILED))
            self._clock.after(self._faults.delay_s(self._wire), lambda: self._fail(write, outcome))

    def drop_peer(self, sender: SimPrefill, peer: str) -> None:
        """The sender forgets a peer: its writes to it end without proof, or are stopped."""
        for write in self.writes:
            if write.sender is sender and write.leg[1] == peer and write.state is WriteState.POSTED:
                self._fail(write, self._faults.choices.one_of((Outcome.UNKNOWN, Outcome.FAILED)))

    def cut(self, sender: SimPrefill) -> None:
        """The sender's engine object was destroyed: its writes are over, and their ends reported."""
        for write in self.writes:
            if write.sender is sender and write.state is WriteState.POSTED:
                write.state = WriteState.DEAD
                self._report(write, self._faults.choices.one_of((Outcome.FAILED, Outcome.UNKNOWN)))

    def _land(self, write: SimWrite) -> None:
        if write.state is not WriteState.POSTED:
            return
        if write.can_land:
            write.target.write_slot(write.action.notice.slot, self._carry(write))
            write.state = WriteState.LANDED
            outcome = Outcome.DONE
        else:
            # The target's engine object was replaced, or the target is dead: no report can be trusted.
            write.state = WriteState.DEAD
            outcome = self._faults.choices.one_of((Outcome.UNKNOWN, Outcome.DONE, Outcome.FAILED))
        delay_s = self._faults.delay_s(self._wire)
        self._clock.after(delay_s, lambda: self._report(write, outcome))

    def _carry(self, write: SimWrite) -> bytes:
        """The bytes of a write as they arrive: one may change, where a checksum can tell."""
        content = write.sender.read_source(write)
        if not (write.action.notice.checksum and self._faults.is_due(self._faults.corrupt)):
            return content
        write.sender.world.taint_transfer(write.action.notice.transfer)
        place = self._faults.choices.pick(len(content))
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    def _fail(self, write: SimWrite, outcome: Outcome) -> None:
        if write.is_reported:
            return
        if outcome is Outcome.FAILED and write.state is WriteState.POSTED:
            write.state = WriteState.DEAD
        self._report(write, outcome)

    def _report(self, write: SimWrite, outcome: Outcome) -> None:
        if not write.is_reported:
            write.is_reported = True
            write.sender.post(lambda: write.sender.write_reported(write, outcome))
