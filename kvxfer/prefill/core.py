"""The prefill side as a sans-I/O state machine: messages, ends of operations and time go in, actions come out.

In the order of a transfer's life: ticket, submit and grant (in any order), chunks planned and moved by the `Sender`,
finished legs, terminal event; beside it abort, deadline and lost peers.
"""

from __future__ import annotations

from collections import Counter

from kvxfer.control.messages import (
    AbortLeg,
    Credits,
    DecodeToPrefill,
    Grant,
    Ping,
    Pulled,
    Query,
    Quiesced,
    QuiescedAck,
    Submit,
)
from kvxfer.errors import RefusedError
from kvxfer.layout import PoolLayout
from kvxfer.ops.totals import CoreFigures
from kvxfer.prefill.actions import Action, SendToPeer
from kvxfer.prefill.admission import SHUTDOWN_DETAIL, find_refusal
from kvxfer.prefill.leg import Leases, Leg, Mode, PeerInfo
from kvxfer.prefill.lifecycle import Lifecycle, explain_abort
from kvxfer.prefill.peers import LegKey, Peer
from kvxfer.prefill.planning import Outlook, look_ahead, plan_for_leg, reach_timeline
from kvxfer.prefill.transfer import Transfer
from kvxfer.slots import SlotState, SlotTable
from kvxfer.transfer import LegState, Reason
from kvxfer.transports.base import Outcome

RESEND_S = 1.0


class PrefillCore:
    """All transfers of one prefill agent. Every method takes the agent's clock, in seconds, as `now`."""

    def __init__(self, slots: SlotTable, mode: Mode, leases: Leases | None = None) -> None:
        """Without `leases` no peer is ever let pull."""
        self._life = Lifecycle(slots, mode, leases)
        self.transfers = self._life.transfers
        """Transfers that have not ended on both sides yet."""
        self.peers: dict[str, Peer] = {}
        self.refused: Counter[str] = Counter()
        """Messages that were dropped, by what was wrong with them."""

    @property
    def num_reading_pool(self) -> int:
        """Operations that may read the worker's pool."""
        return self._life.sender.num_reading_pool

    @property
    def outlook(self) -> Outlook:
        """What whoever moves rows should prepare for."""
        return look_ahead(self._life)

    def allow_raw(self, *, may_send: bool, is_measured: bool) -> None:
        """Whether the engine can write rows straight from the worker's pool, and whether what was measured of a path
        holds for that, too: mode auto takes no other."""
        self._life.may_send_raw, self._life.is_raw_measured = may_send, is_measured

    @property
    def needs_rotation(self) -> bool:
        """Whether so many slots are quarantined that the agent should replace its engine."""
        slots = self._life.sender.slots
        return slots.count(SlotState.QUARANTINED) >= max(1, slots.num_slots // 4)

    def figures(self) -> CoreFigures:
        """What the metrics show. May be called from another thread."""
        life = self._life
        return CoreFigures(
            totals=life.totals,
            num_open=len(life.transfers),
            slots=life.sender.slots.counts(),
            refused=dict(self.refused),
            chosen={mode.value: life.num_chosen[mode] for mode in (Mode.PACKED, Mode.RAW, Mode.P2P)},
            num_fallbacks=life.num_fallbacks,
        )

    def take_actions(self) -> list[Action]:
        """What to do now, in order; call it until there is nothing."""
        return self._life.take_actions()

    # ---- the worker ----

    def attach_worker(self, layout: PoolLayout, *, fills_in_turn: bool = False) -> None:
        """A worker has handed its pool over. `fills_in_turn`: see `RowExecutor`."""
        self._life.layout = layout
        self._life.sender.slots.in_turn = fills_in_turn
        self._life.timeline = 0

    def worker_lost(self, now: float) -> None:
        """The worker is gone: its transfers end, and nobody is told but the peers."""
        self._life.layout = None
        for transfer in self.transfers.values():
            transfer.is_known = False
        self.fail_all(Reason.WORKER_LOST, "the prefill worker is gone", now)

    def fail_all(self, reason: Reason, detail: str, now: float) -> None:
        """End every transfer without success."""
        self._life.fail_all(list(self.transfers.values()), reason, detail, now)

    def begin_drain(self, now: float) -> int:
        """Take on nothing new. What no decode agent has asked for yet is new: it ends, so that its worker knows.
        Returns how many did: decode agents may still ask for them."""
        self._life.is_draining = True
        waiting = [transfer for transfer in self.transfers.values() if not transfer.legs]
        self._life.fail_all(waiting, Reason.SHUTDOWN, SHUTDOWN_DETAIL, now)
        return len(waiting)

    def check_admission(self) -> None:
        """Raises `RefusedError` where this agent takes on nothing new."""
        if self._life.is_draining:
            raise RefusedError(SHUTDOWN_DETAIL, Reason.SHUTDOWN)

    def new_ticket(self, transfer: str, deadline_s: float, now: float, num_decode_groups: int = 1) -> None:
        """The worker asked for a ticket; its grants may come from now on. Raises `RefusedError`."""
        self.check_admission()
        known = Transfer(transfer, True, now, now + deadline_s, num_decode_groups)
        self.transfers[transfer] = known

    def submit(self, message: Submit, now: float) -> None:
        """A chunk of KV is complete. Raises `RefusedError` or `LayoutError`; nothing has changed then."""
        if self._life.layout is None:
            raise RefusedError("submit: no pool is attached; hand one over first")
        transfer = self.transfers.get(message.transfer)
        if transfer is not None and (transfer.has_ended or transfer.reason is not None):
            why = transfer.reason.value if transfer.reason is not None else "all was sent"
            raise RefusedError(f"submit: transfer {message.transfer} is ending: {why}", Reason.STALE)
        if transfer is None:
            if message.transfer in self._life.ended:
                why = self._life.why_ended(message.transfer)
                raise RefusedError(
                    f"submit: transfer {message.transfer} has ended ({why}); ask for a new ticket", Reason.STALE
                )
            self.check_admission()
            # A sibling's agent made the ticket: this one learns of the transfer by its first grant or submit.
            transfer = Transfer(message.transfer, is_known=True, started_at=now, deadline=now + message.deadline_s)
        chunk = transfer.accept(message, self._life.layout)
        self.transfers[message.transfer] = transfer
        transfer.is_known = True
        transfer.deadline = now + message.deadline_s
        for leg in list(transfer.legs.values()):
            if leg.state is LegState.GRANTED:
                leg.move(LegState.ACTIVE)
            plan_for_leg(self._life, transfer, leg, chunk, now)
        self._life.advance(transfer, now)

    def timeline_reached(self, value: int, now: float) -> None:
        """The worker's stream has come so far: chunks that were waiting for it may go."""
        reach_timeline(self._life, value, now)

    def abort(self, transfer: str, now: float) -> None:
        """The worker gives the transfer up. Unknown and ended ones are left as they are."""
        found = self.transfers.get(transfer)
        if found is not None:
            self._life.fail(found, Reason.ABORTED_BY_WORKER, "", now)

    # ---- peers ----

    def peer_paired(self, info: PeerInfo) -> None:
        """A decode agent was paired; its incarnation is new."""
        self.peers[info.incarnation] = Peer(info, info.region_id)
        self._life.sender.num_peers = len(self.peers)

    def region_moved(self, incarnation: str, region_id: int) -> None:
        """The landing slots of a decode agent, none of which is lent, lie in this region from now on."""
        if incarnation in self.peers:
            self.peers[incarnation].region_id = region_id

    def peer_gone(self, incarnation: str, reason: Reason, now: float, *, said_goodbye: bool = False) -> None:
        """A decode agent is lost, or has paired anew: its legs are over. One that said goodbye has aborted before
        what it could not finish: its finished legs stay good."""
        peer = self.peers.pop(incarnation, None)
        if peer is None:
            return
        self._life.sender.num_peers = len(self.peers)
        for leg in list(peer.legs.values()):
            transfer = self.transfers.get(leg.transfer)
            if transfer is not None and (leg.is_live or not (transfer.has_ended or said_goodbye)):
                self._life.fail(transfer, reason, f"{peer.info} is gone", now)

    def receive(self, incarnation: str, message: DecodeToPrefill, now: float) -> None:
        """A message of a paired decode agent."""
        peer = self.peers.get(incarnation)
        if peer is None:
            self.refused["unpaired"] += 1
            if isinstance(message, AbortLeg):
                self._life.give_up(incarnation, "decode agent", message, now)  # it can have no leg
            return
        match message:
            case Grant():
                self._grant(peer, message, now)
            case Ping():
                peer.raise_floor(message.floor)
            case Pulled():
                leg = self._leg(peer, message.transfer, message.generation)
                if leg is not None and leg.state is LegState.ACTIVE:
                    self._life.pulled(self.transfers[leg.transfer], leg, message.chunk, now)
            case Credits():
                leg = self._leg(peer, message.transfer, message.generation)
                if leg is not None and leg.state is LegState.ACTIVE:
                    self._credit(peer, leg, message, now)
            case AbortLeg():
                self._abort_leg(peer, message, now)
            case QuiescedAck():
                leg = self._leg(peer, message.transfer, message.generation)
                if leg is not None:
                    leg.quiesced_acked = True
            case Query():
                leg = peer.legs.get((message.transfer, message.generation))
                self._life.answer_query(peer.info.incarnation, leg, message)
            case _:
                self.refused["unexpected"] += 1

    def _leg(self, peer: Peer, transfer: str, generation: int) -> Leg | None:
        leg = peer.legs.get((transfer, generation))
        if leg is None:
            self.refused["stale"] += 1
        return leg

    def _credit(self, peer: Peer, leg: Leg, message: Credits, now: float) -> None:
        """Use lent landing slots. More of them than this side asked for are a fault of the peer.

        Those of a region that this side was not told of, or after some that are missing, wait to be told of again.
        """
        if message.region_id != peer.region_id:
            self.refused["other region"] += 1
            return
        if message.first > leg.num_credited:
            self.refused["credits missing"] += 1
            return
        slots = message.slots[leg.num_credited - message.first :]
        transfer = self.transfers[leg.transfer]
        if leg.num_credited + len(slots) > leg.num_wanted_sent:
            detail = f"credits: got {leg.num_credited + len(slots)}, expected at most {leg.num_wanted_sent}"
            self._life.fail(transfer, Reason.MISMATCH, detail, now)
            return
        leg.num_credited += len(slots)
        self._life.sender.credit(leg, slots, now)
        self._life.advance_leg(transfer, leg, now)

    def _grant(self, peer: Peer, grant: Grant, now: float) -> None:
        peer.raise_floor(grant.floor)
        key = (grant.transfer, grant.generation)
        if peer.is_refused(key):
            self.refused["stale"] += 1
            return
        known = peer.legs.get(key)
        if known is not None:
            if known.finished is not None:
                self._life.send(known, known.finished)
            elif known.state is LegState.QUIET:
                self._life.send_quiesced(known, now)
            return
        leg = Leg(grant.transfer, peer.info, grant, now + grant.remaining_s, self._life.mode)
        refusal = find_refusal(self._life, peer, grant)
        if refusal is not None:
            peer.legs[key] = leg
            self._life.stop(leg, *refusal)
            self._life.quiesce(leg, now)
            return
        transfer = self.transfers.get(grant.transfer)
        if transfer is None:
            transfer = Transfer(grant.transfer, is_known=False, started_at=now, deadline=leg.deadline)
            self.transfers[grant.transfer] = transfer
        if grant.can_pull and leg.mode in (Mode.P2P, Mode.AUTO) and self._life.leases is not None:
            leg.lease = self._life.leases.take()
        peer.legs[key] = leg
        transfer.add_leg(leg)
        if transfer.chunks:
            leg.move(LegState.ACTIVE)
            for chunk in transfer.chunks:
                plan_for_leg(self._life, transfer, leg, chunk, now)
        self._life.advance(transfer, now)

    def _abort_leg(self, peer: Peer, message: AbortLeg, now: float) -> None:
        key: LegKey = (message.transfer, message.generation)
        leg = peer.legs.get(key) or self._life.leg_of_lost_pairing(peer.info.incarnation, key)
        if leg is None:
            peer.bury(key)
            self._life.give_up(peer.info.incarnation, str(peer.info), message, now)
            quiesced = Quiesced(transfer=message.transfer, generation=message.generation)
            self._life.outbox.append(SendToPeer(peer.info.incarnation, quiesced))
            return
        transfer = self.transfers.get(leg.transfer)
        if transfer is not None and transfer.reason is None and not transfer.has_ended:
            self._life.fail(transfer, Reason.ABORTED_BY_PEER, explain_abort(str(peer.info), message), now)
        if not leg.is_live:
            self._life.send_quiesced(leg, now)

    # ---- ends of operations, time ----

    def gather_ended(
        self, operation: int, now: float, busy_s: float, error: str | None, *, was_begun: bool, digest: bytes = b""
    ) -> None:
        """A gather has ended. `error` says why it failed; `was_begun` is False where its flag was set in time."""
        go_raw = error is not None and self._life.may_send_raw and not self._life.sender.is_verified(operation)
        was_done = was_begun and error is None
        legs = self._life.sender.gather_ended(operation, now, busy_s, was_done=was_done, go_raw=go_raw, digest=digest)
        transfer = self.transfers[legs[0].transfer]  # a gather serves legs of one transfer
        if error is not None and not go_raw:
            self._life.fail(transfer, Reason.GATHER_FAILED, error, now)
            return
        if go_raw:
            self._life.fell_back(error)
        for leg in legs:
            self._life.advance_leg(transfer, leg, now)

    def write_ended(self, operation: int, outcome: Outcome, detail: str, now: float) -> None:
        """A write has ended, or was never posted (`FAILED`)."""
        leg = self._life.sender.write_ended(operation, outcome, now)
        transfer = self.transfers[leg.transfer]
        if outcome is not Outcome.DONE and leg.state is LegState.ACTIVE:
            reason = Reason.WRITE_FAILED if outcome is Outcome.FAILED else Reason.WRITE_UNKNOWN
            self._life.fail(transfer, reason, detail, now)
        else:
            self._life.advance_leg(transfer, leg, now)

    def rotated(self, now: float) -> None:
        """The engine object was replaced and has reported its writes: nothing can use a quarantined slot any more."""
        self._life.rotated(now)

    def tick(self, now: float) -> None:
        """Time has passed: deadlines, answers that were not acknowledged, slots that others are not to wait for."""
        self._life.judge_deadlines(now)
        self._life.mark_slow(now)
        for peer in self.peers.values():
            for leg in peer.legs.values():
                if leg.state is LegState.QUIET and not leg.quiesced_acked and now >= leg.quiesced_sent_at + RESEND_S:
                    self._life.send_quiesced(leg, now)
