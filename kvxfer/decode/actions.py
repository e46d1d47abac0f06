"""What the decode core asks its agent to do. The core does no I/O itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.addresses import BlockAddresses
from kvxfer.control.messages import DecodeToPrefill, Segment, Source, TransferEvent
from kvxfer.operations import CancelFlag, SegmentSource


@dataclass(frozen=True, slots=True)
class Scatter:
    """Put the rows of the landed segment that `notice` announced into the worker's pages. Ends in
    `DecodeCore.scatter_ended`."""

    operation: int
    notice: Segment
    source: SegmentSource
    cancel: CancelFlag

    @property
    def slot(self) -> int:
        return self.notice.slot

    @property
    def segment(self) -> int:
        return self.notice.segment


@dataclass(frozen=True, slots=True, eq=False)
class PreparePull:
    """A `Pull` of these rows will follow when they are written, or nothing: work out now how it is done."""

    peer: str
    source: SegmentSource
    src_addresses: tuple[BlockAddresses, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Copy a chunk's rows straight out of the mapped pool of `peer` into the worker's pages, then look at the lease
    (word, value): the rows count only while it holds. Ends in `DecodeCore.scatter_ended`."""

    operation: int
    peer: str
    source: SegmentSource
    src_addresses: tuple[BlockAddresses, ...]
    lease: tuple[int, int]
    cancel: CancelFlag


@dataclass(frozen=True, slots=True)
class PairWith:
    """Pair with a prefill agent. Ends in `DecodeCore.peer_paired` or `pairing_failed`."""

    source: Source


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Hand a message to the control connection of a prefill agent (by incarnation)."""

    peer: str
    message: DecodeToPrefill


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the worker."""

    event: TransferEvent


Action = Scatter | PreparePull | Pull | PairWith | SendToPeer | Notify
