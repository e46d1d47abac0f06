"""Mode serial: a whole chunk is packed, for every leg of its transfer, before any of it is sent.

What public systems do, kept as a yardstick. Where a chunk does not fit into the slots, as much of it as fits is packed
before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.prefill.leg import Leg, Mode


class SerialGate:
    """Holds legs in mode serial back: from sending while their chunk is packed, from packing while it is sent."""

    def __init__(self) -> None:
        self._held_back: list[Leg] = []

    def may_send(self, leg: Leg, turns: Iterable[Leg], filling: Iterable[Leg], *, has_slot: bool) -> bool:
        """Whether packed segments of `leg`, in mode serial, may go. `turns` have segments that hold no slot, `filling`
        are being packed. A leg that may not is `waiting()` until it may."""
        if leg.is_sending and not leg.packed and leg.num_held == 0:
            leg.is_sending = False
        if not leg.is_sending and leg.packed:
            chunk = leg.packed[0].work.chunk
            is_packing = any(other.transfer == leg.transfer for other in filling)
            # One that holds another chunk packs no more of this one: chunks become ready in any order.
            has_more = any(
                other.transfer == leg.transfer and other.works[0].chunk == chunk and self.may_pack(other)
                for other in turns
            )
            leg.is_sending = not is_packing and not (has_more and has_slot)
            if not leg.is_sending and leg not in self._held_back:
                self._held_back.append(leg)
        return leg.is_sending

    def waiting(self, turns: Iterable[Leg]) -> list[Leg]:
        """Legs in mode serial that may send by now, perhaps: of `turns`, and those held back since the last call."""
        held_back, self._held_back = self._held_back, []
        return [leg for leg in turns if leg.mode is Mode.SERIAL] + held_back

    @staticmethod
    def may_pack(leg: Leg) -> bool:
        """Whether more of `leg` may be packed."""
        if leg.mode is not Mode.SERIAL:
            return True
        return not leg.is_sending and not (leg.num_held > 0 and leg.works[0].next_segment == 0)
