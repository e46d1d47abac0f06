"""What can be asked of the transport `loopback`: faults, the pace of a wire, and who copies."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
_PositiveRate = Annotated[float, msgspec.Meta(gt=0.0)]
_CopyProcesses = Annotated[int, msgspec.Meta(ge=0, le=64)]


class LoopbackFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong, drawn for each write from `seed`. The shares of the fates add up to at most 1.

    Writes overtake each other where `delays_s` (seconds, each write draws one) has several values. The fates:
    `drop`: nothing moves and nothing is reported until `rotate()` reports `UNKNOWN`; `fail`: nothing moves, `FAILED`;
    `truncate`: the first half moves, `FAILED`; `duplicate`: the bytes are written twice before `DONE`; `late`:
    `UNKNOWN` is reported at once, yet the bytes move `late_s` seconds later, from whatever the source holds then.
    """

    seed: int = 0
    delays_s: tuple[_Seconds, ...] = (0.0,)
    drop: _Share = 0.0
    fail: _Share = 0.0
    truncate: _Share = 0.0
    duplicate: _Share = 0.0
    late: _Share = 0.0
    late_s: _Seconds = 0.1


class LoopbackOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No faults, a wire without limits, and one thread that copies, unless asked for.

    A write holds the wire for max(descriptors * `descriptor_s`, bytes / `wire_bytes_per_s`), one after another, and
    is reported no earlier. Its bytes are copied meanwhile: where all its entries are large and no faults are asked for
    by `num_copy_processes` processes together, else by the thread. A wire that is faster than they are is as fast as
    they are.
    """

    faults: LoopbackFaults | None = None
    descriptor_s: _Seconds = 0.0
    wire_bytes_per_s: _PositiveRate = math.inf
    num_copy_processes: _CopyProcesses = 0
