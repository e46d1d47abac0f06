"""Rows on their way into pages: out of landing slots, or straight out of a source's pool."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.addresses import BlockAddresses
from kvxfer.control.messages import PullChunk, Segment
from kvxfer.decode.actions import Action, Pull, Scatter
from kvxfer.decode.lifecycle import Lifecycle
from kvxfer.decode.receive import Receive, ReceivedChunk, ReceiveLeg
from kvxfer.transfer import Reason


@dataclass(frozen=True, slots=True)
class _Move:
    """A segment on its way, or a whole chunk that is pulled: its `slot` is None."""

    receive: Receive
    leg: ReceiveLeg
    chunk: int
    slot: int | None


class Moves:
    """Scatters and pulls from the moment they are emitted to their end."""

    def __init__(self, life: Lifecycle, outbox: list[Action]) -> None:
        self._life = life
        self._outbox = outbox
        self._running: dict[int, _Move] = {}
        self._num_emitted = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def scatter(self, receive: Receive, leg: ReceiveLeg, chunk: ReceivedChunk, notice: Segment) -> None:
        """Put a landed segment into pages."""
        self._life.lender.begin_scatter(leg, notice.slot)
        operation = self._begin(_Move(receive, leg, notice.chunk, notice.slot))
        self._outbox.append(Scatter(operation, notice, chunk.source, receive.cancel))

    def pull(
        self, receive: Receive, leg: ReceiveLeg, message: PullChunk, src_addresses: tuple[BlockAddresses, ...]
    ) -> None:
        """Copy a whole announced chunk into pages."""
        chunk = leg.chunks[message.chunk]
        num_segments = chunk.source.plan.num_segments
        chunk.has_come = bytearray(b"\1" * num_segments)  # a notice about one of them is false
        chunk.is_pulled = True
        if num_segments:
            lease = (message.lease_word, message.lease_value)
            operation = self._begin(_Move(receive, leg, message.chunk, None))
            peer = leg.source.incarnation
            self._outbox.append(Pull(operation, peer, chunk.source, src_addresses, lease, receive.cancel))

    def ended(self, operation: int, now: float, busy_s: float, error: str | None, *, is_corrupt: bool) -> None:
        """A move has ended, was skipped because its flag was set, or failed with `error`."""
        move = self._running.pop(operation)
        receive = move.receive
        receive.num_scattering -= 1
        receive.scatter_s += busy_s
        self._life.totals.scatter_s += busy_s
        if error is not None:
            reason = Reason.PULL_FAILED if move.slot is None else Reason.SCATTER_FAILED
            self._life.fail(receive, Reason.CORRUPT if is_corrupt else reason, error, now)
        elif move.slot is None:
            self._pulled(move)
        self._life.advance(receive, now)
        if move.slot is not None:
            self._life.lender.end_scatter(move.slot)

    def _begin(self, move: _Move) -> int:
        self._num_emitted += 1
        move.receive.num_scattering += 1
        self._running[self._num_emitted] = move
        return self._num_emitted

    def _pulled(self, move: _Move) -> None:
        """A chunk was pulled: the source is told that its pages are read no more."""
        move.leg.chunks[move.chunk].num_missing = 0
        if move.receive.is_open:
            self._life.report_pulled(move.leg, move.chunk)
