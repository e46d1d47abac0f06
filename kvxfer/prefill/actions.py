"""What the prefill core asks its agent to do. The core does no I/O itself.

Structs: several are made for each segment, and frozen dataclasses take five times as long to make.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.control.messages import PrefillToDecode, Segment, TransferEvent
from kvxfer.operations import CancelFlag, SegmentSource


class Gather(msgspec.Struct, frozen=True, eq=False):
    """Pack a segment's rows into a slot. Ends in `PrefillCore.gather_ended`.

    With `wants_digest` the packed bytes' digest (`integrity.digest`) goes along.
    """

    operation: int
    slot: int
    source: SegmentSource
    segment: int
    cancel: CancelFlag
    wants_digest: bool = False


class Runs(msgspec.Struct, frozen=True, eq=False):
    """Source runs of a segment: `src_offsets`, `slot_offsets`, `lengths`, each `[num_runs]` int64 bytes."""

    src_offsets: npt.NDArray[np.int64]
    slot_offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class Write(msgspec.Struct, frozen=True, eq=False):
    """Write a segment into a landing slot of `peer`: packed bytes of `src_slot`, or `runs` straight from the pool.

    When the engine reports it done, the agent sends `notice` to the peer, then tells `PrefillCore.write_ended`.
    """

    operation: int
    peer: str
    notice: Segment
    cancel: CancelFlag
    src_slot: int | None
    runs: Runs | None = None


class SendToPeer(msgspec.Struct, frozen=True, eq=False):
    """Hand a message to the control connection of a decode agent."""

    peer: str
    message: PrefillToDecode


class Notify(msgspec.Struct, frozen=True, eq=False):
    """Tell the worker. `event.transfer` names the transfer."""

    event: TransferEvent


Action = Gather | Write | SendToPeer | Notify
