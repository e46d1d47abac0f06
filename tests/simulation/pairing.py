"""Messages that agents exchange beside those of the cores, as far as the simulation needs them."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.transfer import Reason


@dataclass(frozen=True, slots=True)
class Hello:
    """Decode agent: pair with me. `epoch` numbers the regions of its landing slots."""

    expected: str  # incarnation that the ticket named
    epoch: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Prefill agent: paired."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Prefill agent: never, for this run or its worker is another than the one that made the ticket."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either: we are no longer paired."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """Decode agent: my landing slots lie elsewhere; write there from now on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RotationTaken:
    """Prefill agent: I do."""

    epoch: int
