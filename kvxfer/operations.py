"""What both cores hand to the executors that touch a worker's pool."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.addresses import BlockAddresses
from kvxfer.segments import ChunkPlan


@dataclass(slots=True)
class CancelFlag:
    """Set once when nothing of its owner may start any more; executors look at it just before they begin."""

    is_set: bool = False


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A chunk of one leg as one side's row mover sees it: its plan and where its rows lie in the worker's pool."""

    plan: ChunkPlan
    addresses: tuple[BlockAddresses, ...]
