"""An agent at one moment, as the metrics show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvxfer.control.doorkeeper import DoorCounts
from kvxfer.ops.totals import CoreFigures
from kvxfer.transports.base import Counters


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """`paths` has one entry for each paired agent: how the engine reaches it. `door` is None where nobody connects."""

    side: Literal["prefill", "decode"]
    transport: str
    core: CoreFigures
    engine: Counters
    paths: Sequence[str]
    has_worker: bool
    door: DoorCounts | None = None
    gpu_turn_s: float | None = None
    """How long a move between pool and slots on a GPU takes from its order to its end when none is before it, where a
    stream of the agent's own moves rows."""
    num_slots_wanted: int = 0
    """`TurnWatch.num_wanted`."""
