"""Rows on their way into pages: out of landing slots, or straight out of a source's pool."""

from __future__ import annotations

from typing import NamedTuple

from kvxfer.control.messages import Segment
from kvxfer.decode.actions import Action, PreparePull, Pull, Scatter
from kvxfer.decode.lifecycle import Lifecycle
from kvxfer.decode.receive import Receive, ReceivedChunk, ReceiveLeg, RowsToPull
from kvxfer.transfer import Reason


class _Move(NamedTuple):
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
        self._life.expect_moves(leg, -1)
        self._life.lender.begin_scatter(leg, notice.slot)
        operation = self._begin(_Move(receive, leg, notice.chunk, notice.slot))
        self._outbox.append(Scatter(operation, notice, chunk.source, receive.cancel))

    def announce_pull(self, leg: ReceiveLeg, chunk: ReceivedChunk, rows: RowsToPull) -> None:
        """A whole chunk is to be copied into pages as soon as the source says that it is written."""
        num_segments = chunk.source.plan.num_segments
        chunk.has_come = bytearray(b"\1" * num_segments)  # a notice about one of them is false
        if num_segments:
            chunk.to_pull = rows
            self._life.expect_moves(leg, 1)
            self._outbox.append(PreparePull(leg.source.incarnation, chunk.source, rows.addresses))

    def pull(self, receive: Receive, leg: ReceiveLeg, chunk_idx: int) -> None:
        """An announced chunk is written: copy it into pages. Said again, or of another chunk, it changes nothing."""
        chunk = leg.chunks.get(chunk_idx)
        if chunk is None or chunk.to_pull is None or not receive.is_open:
            return
        rows, chunk.to_pull, chunk.is_pulled = chunk.to_pull, None, True
        self._life.expect_moves(leg, -1)
        operation = self._begin(_Move(receive, leg, chunk_idx, None))
        peer = leg.source.incarnation
        self._outbox.append(Pull(operation, peer, chunk.source, rows.addresses, rows.lease, receive.cancel))

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
        if receive.num_scattering == 0:  # as long as others run, nothing can end by this
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
