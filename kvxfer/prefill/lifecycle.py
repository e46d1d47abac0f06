"""What becomes of a transfer on the prefill side: legs finished or stopped, events.

A transfer ends well when every leg has finished, otherwise all its legs stop with the first that does. Its terminal
event waits for gathers that read the worker's pages, never for a peer.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict

from kvxfer.control.messages import (
    AbortLeg,
    Finished,
    LegFailed,
    LegStatus,
    PrefillToDecode,
    Query,
    Quiesced,
    TransferEvent,
    Want,
)
from kvxfer.layout import PoolLayout
from kvxfer.ops.totals import Totals
from kvxfer.prefill.actions import Action, Notify, SendToPeer
from kvxfer.prefill.leg import Leases, Leg, Mode
from kvxfer.prefill.sender import Sender
from kvxfer.prefill.transfer import Transfer
from kvxfer.slots import SlotTable
from kvxfer.transfer import EventKind, LegState, Reason
from kvxfer.wire import count_runs, plan_chunk, resolve

_log = logging.getLogger("kvxfer.prefill")

MAX_ENDED = 4096
MAX_DETAIL = 1000


class Lifecycle:
    """All transfers that have not been forgotten, and the moves between their states."""

    def __init__(self, slots: SlotTable, mode: Mode, leases: Leases | None) -> None:
        self.outbox: list[Action] = []
        self.layout: PoolLayout | None = None
        self.sender = Sender(slots, self.outbox, self._progress, is_serial=mode is Mode.SERIAL)
        self.mode = mode
        self.may_send_raw = mode is Mode.RAW
        self.is_raw_measured = True
        self.leases = leases
        self.timeline = 0  # how far the worker's stream has come, as far as it was looked at
        self.is_draining = False  # nothing new is taken on
        self.num_chosen: Counter[Mode] = Counter()  # legs in mode auto, by the way that they took
        self.num_fallbacks = 0  # gathers that failed and whose rows went run by run
        self.totals = Totals(_log)
        self.transfers: dict[str, Transfer] = {}
        self.unready_legs: dict[Leg, None] = {}  # with chunks whose rows must not be read yet
        self._pump_at: float | None = None  # when what may let operations begin happened last
        self.ended: OrderedDict[str, Reason | None] = OrderedDict()
        """The newest transfers that were forgotten, and why they ended; None for those that were sent."""

    def _progress(self, leg: Leg, pack_s: float, send_s: float, num_descriptors: int) -> None:
        transfer = self.transfers[leg.transfer]
        transfer.pack_s += pack_s
        transfer.send_s += send_s
        self.totals.pack_s += pack_s
        self.totals.send_s += send_s
        transfer.num_descriptors += num_descriptors

    def fell_back(self, error: str | None) -> None:
        """A gather has failed, and its legs go on without packing."""
        self.num_fallbacks += 1
        _log.warning("a gather has failed, its rows go run by run: %s", error)

    def take_actions(self) -> list[Action]:
        """What to do now, in order; call it until there is nothing. Slots are given out here, for all that has happened
        since the last call; of gathers there is one at a time, so that it can begin before the next is prepared."""
        if self._pump_at is not None and not self.sender.pump(self._pump_at):
            self._pump_at = None
        actions = self.outbox.copy()
        self.outbox.clear()
        return actions

    def rotated(self, now: float) -> None:
        """No engine object is left that could use a quarantined slot."""
        self.sender.slots.release_quarantine()
        self._pump_at = now

    def mark_slow(self, now: float) -> None:
        """Slots that have been in use for long are waited for no more: the one behind them may be free."""
        self.sender.slots.mark_slow()
        self._pump_at = now

    def pulled(self, transfer: Transfer, leg: Leg, chunk: int, now: float) -> None:
        """The peer reads `chunk` of an active leg no more; said again it changes nothing."""
        leg.pulling.discard(chunk)
        uncounted = leg.uncounted.pop(chunk, None)
        if uncounted is not None and self.layout is not None:
            plan, tables = uncounted
            leg.num_runs += count_runs(plan, resolve(plan, leg.peer.route, "src", self.layout, tables))
        self.advance(transfer, now)

    def end_lease(self, leg: Leg) -> None:
        """What is pulled from now on is void."""
        if leg.lease is not None and self.leases is not None:
            self.leases.revoke(leg.lease[0])
            leg.lease = None

    def advance_leg(self, transfer: Transfer, leg: Leg, now: float) -> None:
        """`advance` where nothing has happened but to one leg: as long as that has rows to be read, it cannot finish,
        and it holds the transfer's events back."""
        self._pump_at = now
        if leg.state is LegState.ACTIVE and transfer.reason is None and (leg.works or leg.reads_pool):
            return
        self.advance(transfer, now)

    def advance(self, transfer: Transfer, now: float) -> None:
        """Do all that has become possible: finished legs, events; operations when actions are taken."""
        self._pump_at = now
        for leg in transfer.legs.values():
            if leg.state is LegState.STOPPING:
                self.quiesce(leg, now)
            elif transfer.has_last and transfer.reason is None:
                self._finish(transfer, leg, now)
        if not transfer.has_ended:
            if transfer.reason is not None:
                self._end_failed(transfer, now)
            else:
                self._end_sent(transfer, now)
        if transfer.has_ended and not any(leg.is_live for leg in transfer.legs.values()):
            self._forget(transfer)

    def fail(self, transfer: Transfer, reason: Reason, detail: str, now: float) -> None:
        """End the transfer without success: every live leg stops. Does nothing to one that is ending already."""
        self.fail_all([transfer], reason, detail, now)

    def fail_all(self, transfers: list[Transfer], reason: Reason, detail: str, now: float) -> None:
        """`fail` for each, but all stop first: a slot that one gives back goes to none of the others."""
        for transfer in transfers:
            if transfer.reason is None and not transfer.has_ended:
                transfer.reason, transfer.detail = reason, detail[:MAX_DETAIL]
                for leg in transfer.legs.values():
                    if leg.is_live:
                        self.stop(leg, reason, transfer.detail)
        for transfer in transfers:
            self.advance(transfer, now)

    def judge_deadlines(self, now: float) -> None:
        """End what is too late on either side; look after what is ending."""
        for transfer in list(self.transfers.values()):
            if transfer.reason is None and now >= transfer.deadline:
                self.fail(transfer, Reason.DEADLINE, _explain_deadline("prefill", transfer), now)
            elif transfer.reason is None and any(now >= leg.deadline for leg in transfer.legs.values() if leg.is_live):
                self.fail(transfer, Reason.DEADLINE, _explain_deadline("decode", transfer), now)
            elif transfer.reason is not None and not transfer.has_ended:
                self.advance(transfer, now)

    def leg_of_lost_pairing(self, peer: str, key: tuple[str, int]) -> Leg | None:
        """The leg, if `peer` has paired anew since and something of it may still run."""
        transfer = self.transfers.get(key[0])
        leg = transfer.legs.get(peer) if transfer is not None else None
        return leg if leg is not None and leg.key == key else None

    def give_up(self, peer: str, name: str, abort: AbortLeg, now: float) -> None:
        """A decode agent, which people know by `name`, gave a transfer up before its grant: its worker hears of it now,
        or when it submits."""
        transfer = self.transfers.get(abort.transfer)
        if transfer is None:
            self._keep_end(abort.transfer, Reason.ABORTED_BY_PEER)
        elif peer not in transfer.legs:
            self.fail(transfer, Reason.ABORTED_BY_PEER, explain_abort(name, abort), now)

    def stop(self, leg: Leg, reason: Reason, detail: str) -> None:
        """Emit nothing more for `leg` and tell its peer why; `quiesce` follows when it is quiet."""
        leg.move(LegState.STOPPING)
        self.end_lease(leg)
        leg.unready.clear()
        leg.uncounted.clear()
        self.unready_legs.pop(leg, None)
        self.sender.stop(leg)
        self.send(leg, LegFailed(transfer=leg.transfer, generation=leg.grant.generation, reason=reason, detail=detail))

    def quiesce(self, leg: Leg, now: float) -> None:
        """Declare a stopping leg quiet as soon as all that was emitted has ended."""
        if leg.num_emitted == leg.num_ended:
            leg.move(LegState.QUIET)
            self.send_quiesced(leg, now)

    def send_quiesced(self, leg: Leg, now: float) -> None:
        """Say, or say again, that nothing of `leg` runs any more."""
        leg.quiesced_sent_at = now
        unknown = tuple(leg.unknown_slots)
        self.send(leg, Quiesced(transfer=leg.transfer, generation=leg.grant.generation, unknown_slots=unknown))

    def answer_query(self, peer: str, leg: Leg | None, query: Query) -> None:
        """Say how far the leg is, where it is known."""
        status = LegStatus(transfer=query.transfer, generation=query.generation, state="unknown")
        self.outbox.append(SendToPeer(peer, leg.status() if leg is not None else status))
        if leg is not None and leg.state is LegState.ACTIVE and leg.num_wanted_sent:
            # The last one may be lost, and a leg that holds slots without credits keeps others from theirs.
            want = Want(transfer=leg.transfer, generation=query.generation, num_leased=leg.num_wanted_sent)
            self.outbox.append(SendToPeer(peer, want))

    def send(self, leg: Leg, message: PrefillToDecode) -> None:
        """To the leg's peer."""
        self.outbox.append(SendToPeer(leg.peer.incarnation, message))

    def _finish(self, transfer: Transfer, leg: Leg, now: float) -> None:
        """Finish an active leg whose last segment was written, or pulled.

        A peer that pulls is told of the end after it has pulled everything: if this agent dies before, nobody revokes
        its leases and the worker uses the pages for other rows, so what was pulled must not count.
        """
        if leg.state is not LegState.ACTIVE or leg.pulling or leg.unready:
            return
        if leg.mode is Mode.P2P or len(leg.written) == leg.num_segments:
            self._announce_end(transfer, leg, now)

    def _announce_end(self, transfer: Transfer, leg: Leg, now: float) -> None:
        """Tell the peer that nothing more comes, if all came that it asked for."""
        route, grant = leg.peer.route, leg.grant
        owed = plan_chunk(route, grant.wanted, grant.wanted, grant.have, None, leg.peer.segment_bytes)
        if owed.num_rows != leg.num_rows:
            detail = f"submitted {leg.num_rows} rows of the {owed.num_rows} that the decode side asked for"
            self.fail(transfer, Reason.INCOMPLETE, detail, now)
            return
        leg.finished = Finished(
            transfer=leg.transfer,
            generation=grant.generation,
            num_chunks=leg.num_chunks,
            num_segments=leg.num_segments,
            num_bytes=leg.num_bytes,
            aux=transfer.aux,
        )
        leg.move(LegState.FINISHED)
        self.end_lease(leg)
        self.send(leg, leg.finished)

    def _end_sent(self, transfer: Transfer, now: float) -> None:
        """`source_free` when no row is read any more, `sent` when every leg has finished."""
        if not transfer.has_last or not transfer.has_all_legs:
            return
        legs = transfer.legs.values()
        if not transfer.is_source_free and not any(leg.reads_pool for leg in legs):
            transfer.is_source_free = True
            self._notify(transfer, EventKind.SOURCE_FREE, now)
        if all(leg.state is LegState.FINISHED for leg in legs):
            self._end(transfer, EventKind.SENT, now)

    def _end_failed(self, transfer: Transfer, now: float) -> None:
        legs = transfer.legs.values()
        if any(leg.num_filling for leg in legs):
            return
        if now < transfer.deadline and any(leg.mode is Mode.RAW and leg.num_held for leg in legs):
            return  # a raw write reads the pages; past the deadline one that hangs does harm to a landing slot alone
        aborted = transfer.reason is Reason.ABORTED_BY_WORKER
        self._end(transfer, EventKind.ABORTED if aborted else EventKind.FAILED, now)

    def _end(self, transfer: Transfer, kind: EventKind, now: float) -> None:
        transfer.has_ended = True
        num_bytes = sum(leg.num_bytes for leg in transfer.legs.values())
        self.totals.ended(transfer.transfer, kind, transfer.reason, transfer.detail, num_bytes)
        self._notify(transfer, kind, now)

    def _notify(self, transfer: Transfer, kind: EventKind, now: float) -> None:
        """Tell the worker; nobody where there is none, or where it never knew the transfer."""
        if not transfer.is_known or self.layout is None:
            return
        self.outbox.append(
            Notify(
                TransferEvent(
                    transfer=transfer.transfer,
                    event=kind,
                    reason=transfer.reason,
                    detail=transfer.detail,
                    stats=transfer.stats(now),
                )
            )
        )

    def _forget(self, transfer: Transfer) -> None:
        """Legs live on at their peers, to answer again; of the transfer only its end is kept."""
        if self.transfers.pop(transfer.transfer, None) is None:
            return
        self._keep_end(transfer.transfer, transfer.reason)

    def why_ended(self, transfer: str) -> str:
        """Why a forgotten transfer ended."""
        reason = self.ended[transfer]
        return "all was sent" if reason is None else reason.value

    def _keep_end(self, transfer: str, reason: Reason | None) -> None:
        self.ended.setdefault(transfer, reason)
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)


def explain_abort(name: str, abort: AbortLeg) -> str:
    """Why the decode agent `name` ends a transfer."""
    return f"{name} gave up: {abort.reason.value}{': ' if abort.detail else ''}{abort.detail}"


def _explain_deadline(side: str, transfer: Transfer) -> str:
    missing = transfer.what_is_missing
    return f"the deadline of the {side} side has passed{': ' if missing else ''}{missing}"
