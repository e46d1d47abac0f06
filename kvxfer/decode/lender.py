"""Landing slots and whose turn it is to write one.

Credits go to legs that hold packed segments, in turn, at most `credits_per_leg` at a time. A slot whose last credit
may still be used by an unproven write is quarantined; a peer with many of those gets no more credits.
"""

from __future__ import annotations

from collections import Counter, deque

from kvxfer.control.messages import Credits
from kvxfer.decode.actions import Action, SendToPeer
from kvxfer.decode.receive import ReceiveLeg
from kvxfer.slots import SlotState, SlotTable


class SlotLender:
    """Gives credits and takes slots back."""

    def __init__(self, slots: SlotTable, credits_per_leg: int, outbox: list[Action]) -> None:
        self.slots = slots
        self._credits_per_leg = credits_per_leg
        self._outbox = outbox
        self._turns: deque[ReceiveLeg] = deque()  # legs that want more credits than they got
        self._num_lent: Counter[str] = Counter()  # credited slots by source
        self.num_sources = 0
        self.region_id = 0
        """Where the slots lie now."""

    @property
    def quarantine_cap(self) -> int:
        """Quarantined slots at which a peer gets no more credits."""
        return max(1, self.slots.num_slots // 4)

    @property
    def may_be_renewed(self) -> bool:
        """Whether enough slots are quarantined to move to other memory, and none of the others is in use."""
        in_use = self.slots.count(SlotState.CREDITED) + self.slots.count(SlotState.SCATTERING)
        return in_use == 0 and self.slots.count(SlotState.QUARANTINED) >= self.quarantine_cap

    def want(self, leg: ReceiveLeg, num_wanted: int) -> None:
        """`leg` holds packed segments for `num_wanted` credits over its life."""
        leg.num_wanted = max(leg.num_wanted, num_wanted)
        if leg.num_wanted > leg.num_credited and leg not in self._turns:
            self._turns.append(leg)
        self.lend()

    def lend(self) -> None:
        """Credit free slots, one a turn. With half of them quarantined none is lent, until they have been renewed."""
        if not (self._turns and self.slots.num_free):
            return
        if self.slots.count(SlotState.QUARANTINED) > self.slots.num_slots // 2:
            return
        given: dict[int, tuple[ReceiveLeg, list[int]]] = {}
        num_passed = 0
        while self.slots.num_free and num_passed < len(self._turns):
            leg = self._turns[0]
            self._turns.rotate(-1)
            if not self._may_have(leg):
                num_passed += 1
                continue
            slot = self.slots.take(SlotState.CREDITED)
            assert slot is not None
            num_passed = 0
            leg.credits[slot] = leg.num_credited
            leg.num_credited += 1
            self._num_lent[leg.source.incarnation] += 1
            given.setdefault(id(leg), (leg, []))[1].append(slot)
            if leg.num_credited >= leg.num_wanted:
                self._turns.remove(leg)
        for leg, slots in given.values():
            self._tell(leg, slots)

    def repeat(self, leg: ReceiveLeg, num_known: int) -> None:
        """The source of `leg` knows its first `num_known` credits: tell it of the others, which it cannot have used."""
        slots = [slot for slot, number in leg.credits.items() if number >= num_known]
        if slots and len(slots) == leg.num_credited - num_known:
            self._tell(leg, slots)

    def _tell(self, leg: ReceiveLeg, slots: list[int]) -> None:
        """Of the newest credits of `leg`."""
        message = Credits(
            transfer=leg.transfer,
            generation=leg.generation,
            region_id=self.region_id,
            first=leg.num_credited - len(slots),
            slots=tuple(slots),
        )
        self._outbox.append(SendToPeer(leg.source.incarnation, message))

    def begin_scatter(self, leg: ReceiveLeg, slot: int) -> None:
        """The leg has filled `slot`, which makes room for another credit of its own."""
        self._take_back(leg, slot)
        self.slots.move(slot, SlotState.SCATTERING)
        self.lend()

    def end_scatter(self, slot: int) -> None:
        """Nothing uses `slot` any more."""
        self.slots.move(slot, SlotState.FREE)
        self.lend()

    def drop_segment(self, leg: ReceiveLeg, slot: int) -> None:
        """The leg has filled `slot` after its transfer had ended: its rows go nowhere."""
        self._take_back(leg, slot)
        self.slots.move(slot, SlotState.FREE)
        self.lend()

    def drop_wants(self, leg: ReceiveLeg) -> None:
        """`leg` gets no more credits; those that it holds stay its own."""
        if leg in self._turns:
            self._turns.remove(leg)

    def close(self, leg: ReceiveLeg, unknown_slots: frozenset[int]) -> None:
        """No write of `leg` is under way any more, but for those to `unknown_slots`."""
        self.drop_wants(leg)
        for slot in list(leg.credits):
            self._take_back(leg, slot)
            if slot in unknown_slots:
                self.slots.quarantine(slot, leg.source.incarnation)
            else:
                self.slots.move(slot, SlotState.FREE)
        self.lend()

    def _take_back(self, leg: ReceiveLeg, slot: int) -> None:
        del leg.credits[slot]
        self._num_lent[leg.source.incarnation] -= 1

    def _may_have(self, leg: ReceiveLeg) -> bool:
        source = leg.source.incarnation
        if len(leg.credits) >= self._credits_per_leg or not self.slots.has_room(
            self._num_lent[source], self.num_sources
        ):
            return False
        return self.slots.num_quarantined(source) < self.quarantine_cap
