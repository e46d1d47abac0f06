"""Paired decode agents as the prefill core knows them: their legs, the floor of their generations, tombstones."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.prefill.leg import Leg, PeerInfo

MAX_LEGS_PER_PEER = 4096
MAX_TOMBSTONES_PER_PEER = 4096

LegKey = tuple[str, int]  # transfer, generation


@dataclass(slots=True)
class Peer:
    """One run of a decode agent. Ended legs stay, to give the same answer again, until the floor passes them."""

    info: PeerInfo
    region_id: int  # where its landing slots lie, as far as it has said
    floor: int = 0
    legs: dict[LegKey, Leg] = field(default_factory=dict)
    tombstones: set[LegKey] = field(default_factory=set)

    def raise_floor(self, floor: int) -> None:
        """Generations below `floor` are over on the decode side: forget what was kept for them, also what has ended
        here only since the floor was told last."""
        if floor < self.floor:
            return
        self.floor = floor
        self.legs = {key: leg for key, leg in self.legs.items() if key[1] >= floor or leg.is_live}
        self.tombstones = {key for key in self.tombstones if key[1] >= floor}

    def is_refused(self, key: LegKey) -> bool:
        """Whether a grant for `key` comes too late."""
        return key[1] < self.floor or key in self.tombstones

    def has_room(self) -> bool:
        """Whether one more leg may be kept. At the cap the oldest ended one is forgotten: a long transfer may hold
        the floor down while thousands of short ones come and go."""
        if len(self.legs) >= MAX_LEGS_PER_PEER:
            ended = next((key for key, leg in self.legs.items() if not leg.is_live), None)
            if ended is None:
                return False
            del self.legs[ended]
        return True

    def bury(self, key: LegKey) -> None:
        """Refuse a grant for `key` that may still be under way. At the cap the floor rises instead: a peer with so
        many unknown aborts has lost count of its own transfers."""
        if len(self.tombstones) >= MAX_TOMBSTONES_PER_PEER:
            self.raise_floor(max(generation for _, generation in self.tombstones) + 1)
        if key[1] >= self.floor:
            self.tombstones.add(key)
