"""What a `StagedRowStream` has for each lane of its ring, and keeps of each entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.streams.cuda_track import LaneLaunch


@dataclass(slots=True)
class StagedLane:
    """A lane's memory on the GPU, its words and then the table of memories, and what moves its rows. One entry at a
    time uses it."""

    address: int
    launch: LaneLaunch
    stream: Any
    uploaded: Any
    moved: Any
    downloaded: Any


@dataclass(frozen=True, slots=True)
class RunningEntry:
    """An entry under way. `tells_turn`: it moves no more than a slot, and nothing else was under way when it was
    given, so that it takes about as long as this process's turn on the GPU is in coming."""

    ended: Any
    given_s: float
    tells_turn: bool
