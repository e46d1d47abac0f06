"""What the decode core asks its agent to do. The core does no I/O itself. Tuples: a segment takes several."""

from __future__ import annotations

from typing import NamedTuple

from kvxfer.addresses import BlockAddresses
from kvxfer.control.messages import DecodeToPrefill, Segment, Source, TransferEvent
from kvxfer.operations import CancelFlag, SegmentSource


class Scatter(NamedTuple):
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


class PreparePull(NamedTuple):
    """A `Pull` of these rows will follow when they are written, or nothing: work out now how it is done."""

    peer: str
    source: SegmentSource
    src_addresses: tuple[BlockAddresses, ...]


class Pull(NamedTuple):
    """Copy a chunk's rows straight out of the mapped pool of `peer` into the worker's pages, then look at the lease
    (word, value): the rows count only while it holds. Ends in `DecodeCore.scatter_ended`."""

    operation: int
    peer: str
    source: SegmentSource
    src_addresses: tuple[BlockAddresses, ...]
    lease: tuple[int, int]
    cancel: CancelFlag


class PairWith(NamedTuple):
    """Pair with a prefill agent. Ends in `DecodeCore.peer_paired` or `pairing_failed`."""

    source: Source


class SendToPeer(NamedTuple):
    """Hand a message to the control connection of a prefill agent (by incarnation)."""

    peer: str
    message: DecodeToPrefill


class Notify(NamedTuple):
    """Tell the worker."""

    event: TransferEvent


Action = Scatter | PreparePull | Pull | PairWith | SendToPeer | Notify
