"""The decode side as a sans-I/O state machine: messages, ends of operations and time go in, actions come out.

In the order of a transfer's life: open, pairing, grants, then per leg chunk, want, segment and finished, landed;
beside it abort, deadline and lost peers. What becomes of a transfer lies in `decode/lifecycle.py`.
"""

from __future__ import annotations

from collections import Counter

from kvxfer.control.messages import (
    AbortLeg,
    Chunk,
    Finished,
    LegFailed,
    LegStatus,
    Open,
    PrefillToDecode,
    PullChunk,
    PullReady,
    Quiesced,
    QuiescedAck,
    RejectTicket,
    Segment,
    Want,
)
from kvxfer.decode.actions import Action, PairWith, SendToPeer
from kvxfer.decode.chunks import plan_received, rows_to_pull, segment_problem
from kvxfer.decode.lifecycle import MAX_DETAIL, Lifecycle
from kvxfer.decode.moves import Moves
from kvxfer.decode.receive import Receive, ReceiveLeg, SourceInfo, accept_open, check_free
from kvxfer.errors import LayoutError, RefusedError
from kvxfer.layout import PoolLayout
from kvxfer.ops.totals import CoreFigures
from kvxfer.slots import SlotState, SlotTable
from kvxfer.transfer import Reason

SHUTDOWN_DETAIL = "the decode agent is shutting down"


class DecodeCore:
    """All transfers of one decode agent. Every method takes the agent's clock, in seconds, as `now`."""

    def __init__(self, slots: SlotTable, credits_per_leg: int) -> None:
        self._outbox: list[Action] = []
        self._life = Lifecycle(slots, credits_per_leg, self._outbox)
        self.sources: dict[str, SourceInfo] = {}
        self.layout: PoolLayout | None = None
        self.refused: Counter[str] = Counter()
        """Messages that were dropped, by what was wrong with them."""
        self._moves = Moves(self._life, self._outbox)
        self._num_opened = 0
        self.is_draining = False
        """Nothing new is taken on."""

    @property
    def receives(self) -> dict[str, Receive]:
        """Transfers with a leg that is not closed yet."""
        return self._life.receives

    @property
    def num_touching_pool(self) -> int:
        """Operations that may write the worker's pool."""
        return self._moves.num_running

    def figures(self) -> CoreFigures:
        """What the metrics show. May be called from another thread."""
        life = self._life
        return CoreFigures(
            totals=life.totals,
            num_open=len(life.receives),
            slots=life.lender.slots.counts(),
            refused=dict(self.refused),
        )

    @property
    def num_moves_to_come(self) -> int:
        """Scatters and pulls that will be emitted if nothing ends early, as far as announced."""
        return self._life.num_moves_to_come

    def take_actions(self) -> list[Action]:
        """What to do now, in order."""
        actions = list(self._outbox)
        self._outbox.clear()
        return actions

    def floor(self) -> int:
        """The lowest generation that is still live; every one below is over."""
        return min((receive.generation for receive in self.receives.values()), default=self._num_opened + 1)

    @property
    def may_renew_slots(self) -> bool:
        """Whether the agent should move its landing slots to other memory now: no credit for them is out."""
        return self._life.lender.may_be_renewed

    # ---- the worker ----

    def check_admission(self) -> None:
        """Raises `RefusedError` where this agent takes on nothing new."""
        if self.is_draining:
            raise RefusedError(SHUTDOWN_DETAIL, Reason.SHUTDOWN)

    def attach_worker(self, layout: PoolLayout) -> None:
        """A worker has handed its pool over."""
        self.layout = layout

    def worker_lost(self, now: float) -> None:
        """The worker is gone: its transfers end, and nobody is told but the peers."""
        for receive in self.receives.values():
            receive.is_orphan = True
        self.fail_all(Reason.WORKER_LOST, "the decode worker is gone", now)
        self.layout = None

    def fail_all(self, reason: Reason, detail: str, now: float) -> None:
        """End every open transfer without success."""
        for receive in list(self.receives.values()):
            self._life.fail(receive, reason, detail, now)

    def open(self, message: Open, now: float) -> None:
        """Receive a transfer. Raises `RefusedError` or `LayoutError`; nothing has changed then."""
        self.check_admission()
        if self.layout is None:
            raise RefusedError("open: no pool is attached; hand one over first")
        if message.ticket.transfer in self.receives:
            raise RefusedError(f"open: transfer {message.ticket.transfer} is open already, or is still being ended")
        receive = self._accept(message, self.layout, now)
        self._life.grant(receive, self.layout, self.floor(), now)

    def reject(self, message: RejectTicket, now: float) -> None:
        """The worker will not open the ticket: tell its sources. Raises `RefusedError`, as `open`."""
        if self.layout is None or message.ticket.transfer in self.receives:
            raise RefusedError(f"reject: transfer {message.ticket.transfer} is open; abort it")
        empty = Open(ticket=message.ticket, groups=(), deadline_s=0.0)
        receive = self._accept(empty, self.layout, now)
        receive.is_orphan = True  # there is no event to wait for
        self._life.fail(receive, Reason.REJECTED, "the decode worker rejected the ticket", now)

    def _accept(self, message: Open, layout: PoolLayout, now: float) -> Receive:
        receive = accept_open(message, layout, self._num_opened + 1, now)
        check_free(receive, (other for other in self.receives.values() if not other.has_ended))
        self._num_opened += 1
        self.receives[receive.transfer] = receive
        for leg in receive.legs:
            leg.info = self.sources.get(leg.source.incarnation)
            if leg.info is None:
                self._outbox.append(PairWith(leg.source))
        return receive

    def abort(self, transfer: str, now: float) -> None:
        """The worker gives the transfer up. Unknown and ended ones are left as they are."""
        receive = self.receives.get(transfer)
        if receive is not None:
            self._life.fail(receive, Reason.ABORTED_BY_WORKER, "", now)

    # ---- peers ----

    def peer_paired(self, info: SourceInfo, now: float) -> None:
        """A prefill agent was paired."""
        self.sources[info.incarnation] = info
        self._life.lender.num_sources = len(self.sources)
        for receive in list(self.receives.values()):
            legs = [leg for leg in receive.legs if leg.source.incarnation == info.incarnation and leg.info is None]
            for leg in legs:
                leg.info = info
            if legs and receive.is_open and self.layout is not None:
                self._life.grant(receive, self.layout, self.floor(), now)
            elif not receive.is_open:
                for leg in legs:
                    self._life.abort(receive, leg, now)

    def aborts_for(self, incarnation: str, reason: Reason, detail: str) -> list[AbortLeg]:
        """What to tell a prefill agent that is about to be given up: which of its legs end without success."""
        return [
            AbortLeg(transfer=leg.transfer, generation=leg.generation, reason=reason, detail=detail[:MAX_DETAIL])
            for receive in self.receives.values()
            for leg in receive.legs
            if leg.source.incarnation == incarnation and not leg.is_closed and not leg.has_come
        ]

    def peer_gone(self, incarnation: str, reason: Reason, detail: str, now: float) -> None:
        """A prefill agent is lost, refused to pair, or could not be reached."""
        self.sources.pop(incarnation, None)
        self._life.lender.num_sources = len(self.sources)
        for receive in list(self.receives.values()):
            for leg in receive.legs:
                if leg.source.incarnation == incarnation and not leg.is_closed:
                    has_come = leg.has_come
                    self._life.close(leg, frozenset(leg.credits))
                    if not has_come:  # what is only on its way into pages needs no source
                        self._life.fail(receive, reason, detail, now)
            self._life.settle(receive, now)

    def receive(self, incarnation: str, message: PrefillToDecode, now: float) -> None:
        """A message about a leg, from a paired prefill agent."""
        match message:
            case Segment() | Want() | Chunk() | PullChunk() | PullReady():
                leg = self._leg(incarnation, message.transfer, message.generation)
            case Finished() | LegFailed() | Quiesced() | LegStatus():
                leg = self._leg(incarnation, message.transfer, message.generation)
            case _:
                self.refused["unexpected"] += 1
                return
        if leg is None:
            self.refused["stale"] += 1
            if isinstance(message, Quiesced):
                ack = QuiescedAck(transfer=message.transfer, generation=message.generation)
                self._outbox.append(SendToPeer(incarnation, ack))
            return
        leg.asked_at = now
        self._dispatch(self.receives[leg.transfer], leg, message, now)

    def _leg(self, incarnation: str, transfer: str, generation: int) -> ReceiveLeg | None:
        receive = self._life.receives.get(transfer)
        if receive is None or receive.generation != generation:
            return None
        for leg in receive.legs:
            if leg.source.incarnation == incarnation and not leg.is_closed:
                return leg
        return None

    def _dispatch(self, receive: Receive, leg: ReceiveLeg, message: PrefillToDecode, now: float) -> None:
        match message:
            case Segment():
                self._segment(receive, leg, message, now)
            case Want():
                if receive.is_open:
                    self._life.lender.want(leg, message.num_leased)
            case Chunk() | PullChunk():
                self._chunk(receive, leg, message, now)
            case PullReady():
                self._moves.pull(receive, leg, message.chunk)
            case Finished():
                leg.finished = message
                self._life.advance(receive, now)
            case LegFailed():
                by_peer = message.reason is Reason.ABORTED_BY_WORKER  # by the other side's, that is
                reason = Reason.ABORTED_BY_PEER if by_peer else message.reason
                self._life.fail(receive, reason, f"prefill agent: {message.detail or reason.value}", now)
            case Quiesced():
                self._outbox.append(
                    SendToPeer(leg.source.incarnation, QuiescedAck(transfer=leg.transfer, generation=leg.generation))
                )
                self._life.close(leg, frozenset(message.unknown_slots))
                self._life.fail(receive, Reason.ABORTED_BY_PEER, "prefill agent: the leg was stopped", now)
            case LegStatus():
                self._status(receive, leg, message, now)

    def _status(self, receive: Receive, leg: ReceiveLeg, message: LegStatus, now: float) -> None:
        """Answer to a query: take over what was announced and lost on the way."""
        if message.state == "unknown":
            self._life.close(leg, frozenset(leg.credits))
            self._life.fail(receive, Reason.STALE, "prefill agent: does not know the leg", now)
            return
        for notice in message.segments:
            self._segment(receive, leg, notice, now)
        if receive.is_open:
            self._life.lender.repeat(leg, message.num_credited)
        if message.finished is not None and leg.finished is None:
            leg.finished = message.finished
            self._life.advance(receive, now)

    def _chunk(self, receive: Receive, leg: ReceiveLeg, message: Chunk | PullChunk, now: float) -> None:
        """Plan the chunk as the source did; whatever differs ends the transfer."""
        if not receive.is_open or message.chunk in leg.chunks:
            return
        assert self.layout is not None
        began_s = self._life.clock()
        try:
            chunk = plan_received(self.layout, receive, leg, message)
            to_pull = rows_to_pull(leg, message, chunk) if isinstance(message, PullChunk) else None
        except LayoutError as error:
            self._life.fail(receive, Reason.MISMATCH, str(error), now)
            return
        plan_s = self._life.clock() - began_s
        receive.plan_s += plan_s
        self._life.totals.plan_s += plan_s
        leg.chunks[message.chunk] = chunk
        leg.num_rows += chunk.source.plan.num_rows
        leg.num_bytes += chunk.source.plan.num_bytes
        leg.num_segments += chunk.source.plan.num_segments
        if to_pull is None:
            self._life.expect_moves(leg, chunk.num_missing)
        else:
            self._moves.announce_pull(leg, chunk, to_pull)
        self._life.advance(receive, now)

    def _segment(self, receive: Receive, leg: ReceiveLeg, message: Segment, now: float) -> None:
        """A landing slot was filled. A repeated notice changes nothing; a false one ends the transfer."""
        chunk = leg.chunks.get(message.chunk)
        # A slot may have been lent again since: only the segment's own bit says whether this is news.
        if message.slot not in leg.credits or (chunk is not None and chunk.holds(message.segment)):
            self.refused["repeated segment"] += 1
            return
        if not receive.is_open:
            self._life.lender.drop_segment(leg, message.slot)
            return
        problem = segment_problem(chunk, message)
        if problem is not None or chunk is None:
            self._life.fail(receive, Reason.MISMATCH, problem or "", now)
            return
        chunk.has_come[message.segment] = 1
        chunk.num_missing -= 1
        self._moves.scatter(receive, leg, chunk, message)

    # ---- ends of operations, time ----

    def scatter_ended(
        self, operation: int, now: float, busy_s: float, error: str | None, *, is_corrupt: bool = False
    ) -> None:
        """A scatter or a pull has ended after `busy_s` of work, was skipped because its flag was set, or failed with
        `error`."""
        self._moves.ended(operation, now, busy_s, error, is_corrupt=is_corrupt)

    def slots_lie_in(self, region_id: int) -> None:
        """Where credits are valid from now on."""
        self._life.lender.region_id = region_id

    def rotated(self) -> None:
        """The slots have moved: nothing can write a quarantined one any more. No credit may be out then: the bytes of a
        healthy write would be lost, and its sender might still be told that they arrived."""
        assert self._life.lender.slots.count(SlotState.CREDITED) == 0
        self._life.lender.slots.release_quarantine()
        self._life.lender.lend()

    def tick(self, now: float) -> None:
        """Time has passed: deadlines, queries and repeated aborts."""
        for receive in list(self.receives.values()):
            # Rows that are all here and only on their way into pages have made it in time.
            if receive.is_open and now >= receive.deadline and not receive.has_come:
                self._life.fail(receive, Reason.DEADLINE, "the deadline of the decode side has passed", now)
            self._life.remind(receive, now)
