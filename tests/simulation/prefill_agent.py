"""The prefill agent of the simulation: it performs what a real `PrefillCore` asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import numpy as np

from kvxfer.control.messages import AbortLeg, DecodeToPrefill
from kvxfer.integrity import digest
from kvxfer.prefill.actions import Action, Gather, Notify, SendToPeer, Write
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.leg import PeerInfo
from kvxfer.slots import SENDER_MOVES, SlotState
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.base import Outcome
from tests.simulation import pairing
from tests.simulation.agent import SimAgent, WatchedSlots
from tests.simulation.choices import HEAVY
from tests.simulation.engine import LegId, SimWrite, WriteState
from tests.simulation.executor import Executor, Operation
from tests.simulation.judge import check_sender_slots
from tests.simulation.network import Link
from tests.simulation.pull import LeaseWords
from tests.simulation.topology import ROW_BYTES, SLOT_BYTES
from tests.simulation.violation import check

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimPrefill(SimAgent[Action]):
    """One run of a prefill agent."""

    def __init__(self, world: World, idx: int, incarnation: str) -> None:
        setup = world.setup
        super().__init__(world, f"prefill {idx}", incarnation, setup.num_sender_slots)
        self.idx = idx
        self.slots = WatchedSlots(
            setup.num_sender_slots, SENDER_MOVES, lambda slot, state: world.judge.sender_slot(self, slot, state)
        )
        self.leases = LeaseWords()
        self.core = PrefillCore(self.slots, setup.mode, self.leases)
        self.links: dict[str, Link] = {}  # by the peer's incarnation, the newest
        self.gathers: dict[int, Operation] = {}
        self.writes: dict[int, SimWrite] = {}  # emitted, and not yet known to have ended
        self.unproven: list[SimWrite] = []  # mode raw: ends of unknown outcome, kept from the core until a rotation
        self._epochs: dict[str, int] = {}
        threads = setup.num_threads, world.faults, setup.rows
        self._executor = Executor(self, *threads, self._gather, self._gathered, self._begun, lambda _: None)

    def epoch_of(self, peer: str) -> int | None:
        """The engine object of `peer` that this side would write to."""
        return self._epochs.get(peer)

    # ---- the worker ----

    def lose_worker(self) -> None:
        self.core.worker_lost(self.clock.now)
        self.collect()
        for peer in list(self.links):
            self._lose_peer(peer, Reason.WORKER_LOST)

    def begin_drain(self) -> None:
        self.core.begin_drain(self.clock.now)

    def is_drained(self) -> bool:
        return not self.core.transfers

    def fail_all(self) -> None:
        self.core.fail_all(Reason.SHUTDOWN, "it ends", self.clock.now)

    def say_goodbye(self) -> None:
        for link in self.links.values():
            link.to_decode.send(pairing.Goodbye())

    # ---- peers ----

    def received(self, link: Link, message: object) -> None:
        """A message of a decode agent has arrived."""
        peer = link.decode.incarnation
        known = self.links.get(peer)
        match message:
            case _ if known is not None and known.number > link.number:
                return  # of a connection that a newer one has replaced
            case pairing.Hello():
                self._hello(link, message)
            case AbortLeg() if known is not link:
                self.core.receive("", message, self.clock.now)
            case _ if known is not link:
                link.to_decode.send(pairing.Goodbye())
            case pairing.Goodbye():
                self._forget_peer(peer, Reason.PEER_LOST, said_goodbye=True)
            case pairing.Rotated():
                if message.epoch >= self._epochs[peer]:
                    self._epochs[peer] = message.epoch
                    self.core.region_moved(peer, message.epoch)
                    link.to_decode.send(pairing.RotationTaken(message.epoch))
            case _:
                self.core.receive(peer, cast(DecodeToPrefill, message), self.clock.now)

    def _hello(self, link: Link, hello: pairing.Hello) -> None:
        if self.pool is None and hello.expected == self.incarnation:
            link.to_decode.send(pairing.Refused(Reason.WORKER_LOST))
            return
        peer = link.decode.incarnation
        self._forget_peer(peer, Reason.PEER_LOST)
        if hello.expected != self.incarnation:
            link.to_decode.send(pairing.Refused(Reason.STALE))
            return
        self.links[peer], self.heard_at[peer], self._epochs[peer] = link, self.clock.now, hello.epoch
        decode = link.decode
        setup = self.world.setup
        route = setup.topology.route(self.idx, decode.group_idx, decode.rank)
        self.core.peer_paired(
            PeerInfo(peer, route, SLOT_BYTES, decode.world_size, verify=setup.verify, region_id=hello.epoch)
        )
        link.to_decode.send(pairing.Welcome())

    def _lose_peer(self, peer: str, reason: Reason) -> None:
        if peer in self.links:
            self.links[peer].to_decode.send(pairing.Goodbye())
            self._forget_peer(peer, reason)

    def _forget_peer(self, peer: str, reason: Reason, *, said_goodbye: bool = False) -> None:
        if self.links.pop(peer, None) is not None:
            for leg in self.core.peers[peer].legs.values():
                self.world.taint_transfer(leg.transfer)
            self.core.peer_gone(peer, reason, self.clock.now, said_goodbye=said_goodbye)
            self.collect()
            self.world.engines.drop_peer(self, peer)

    # ---- actions ----

    def new_actions(self) -> list[Action]:
        actions: list[Action] = []
        while found := self.core.take_actions():
            actions += found
        for action in actions:
            self.world.judge.prefill_action(self, action)
        return actions

    def emitted_gather(self, gather: Gather, transfer: str) -> None:
        """Note a gather from its emission on."""
        self.gathers[gather.operation] = Operation(
            gather.operation,
            gather.slot,
            transfer,
            gather.source,
            gather.segment,
            gather.cancel,
            None,
            wants_digest=gather.wants_digest,
        )

    def emitted_write(self, write: Write) -> None:
        """Note a write from its emission on."""
        notice = write.notice
        leg: LegId = (self.incarnation, write.peer, notice.transfer, notice.generation)
        self.writes[write.operation] = SimWrite(write, leg, self, self.world.decode_of(write.peer))
        self.world.engines.emitted(self.writes[write.operation])

    def perform(self, action: Action) -> None:
        match action:
            case SendToPeer():
                link = self.links.get(action.peer)
                if link is not None:
                    link.to_decode.send(action.message)
            case Notify():
                self._notify(action)
            case Gather():
                self._executor.submit(self.gathers[action.operation])
            case Write():
                write = self.writes[action.operation]
                if self.world.setup.posts_in_loop:
                    self._check_cancel(write)
                else:
                    self.after(self.world.delay_s(self.world.setup.rows), lambda: self._check_cancel(write))

    def _notify(self, notify: Notify) -> None:
        side = self.sides.get(notify.event.transfer)
        if side is None or self.pool is None:
            return
        self.pool.release(side)
        if notify.event.event is not EventKind.SOURCE_FREE:
            del self.sides[side.request.transfer]
            side.request.ended(side, notify.event)

    def _check_cancel(self, write: SimWrite) -> None:
        """Look at the cancel flag just before posting; the process may be stopped in between."""
        self.world.judge.begun(self, (self.core._life.sender._writes[write.action.operation].leg,))
        if write.action.cancel.is_set or write.action.peer not in self.links:
            write.state, write.is_reported = WriteState.DEAD, True
            if self.world.setup.posts_in_loop:
                self.write_reported(write, Outcome.FAILED)
            else:
                self.post(lambda: self.write_reported(write, Outcome.FAILED))
            return
        write.state, write.epoch = WriteState.CHECKED, self._epochs[write.action.peer]
        faults = self.world.faults
        if self.world.setup.posts_in_loop:
            if faults.is_due(faults.interrupt):
                self.stop_before(lambda: self._post(write), self.world.choices.delay_s(HEAVY))
            else:
                self._post(write)
        else:
            self.after(self.world.delay_s(self.world.setup.rows), lambda: self._post(write))

    def _post(self, write: SimWrite) -> None:
        self.world.judge.posted(write)
        self.world.engines.post(write)

    # ---- ends of operations ----

    def _gather(self, operation: Operation) -> None:
        """The bytes move, in a thread."""
        slot = self.memory[operation.slot]
        for pool_offset, slot_offset, num_bytes in operation.copies():
            slot[slot_offset : slot_offset + num_bytes] = self._read_pool(pool_offset, num_bytes, operation.transfer)
        if operation.wants_digest:
            first_byte, end_byte = operation.source.plan.segment_range(operation.segment)
            operation.digest = digest(np.frombuffer(slot, dtype=np.uint8, count=end_byte - first_byte))

    def _begun(self, operation: Operation) -> None:
        self.world.judge.begun(self, self.core._life.sender._gathers[operation.operation].legs)

    def _gathered(self, operation: Operation, error: str | None, was_begun: bool) -> None:
        self.world.judge.gather_ended(self, operation)
        del self.gathers[operation.operation]
        if error is not None:
            self.world.taint_transfer(operation.transfer)
        self.core.gather_ended(
            operation.operation, self.clock.now, 0.0, error, was_begun=was_begun, digest=operation.digest
        )

    def read_source(self, write: SimWrite) -> bytes:
        """What a write reads at the moment when it lands."""
        action = write.action
        if action.runs is None:
            assert action.src_slot is not None
            return bytes(self.memory[action.src_slot][: action.notice.num_bytes])
        content = bytearray(action.notice.num_bytes)
        runs = action.runs
        for first, slot_offset, length in zip(
            runs.src_offsets.tolist(), runs.slot_offsets.tolist(), runs.lengths.tolist(), strict=True
        ):
            for row in range(0, length, ROW_BYTES):
                value = self._read_pool(first + row, ROW_BYTES, action.notice.transfer)
                content[slot_offset + row : slot_offset + row + ROW_BYTES] = value
        return bytes(content)

    def _read_pool(self, offset: int, num_bytes: int, transfer: str) -> bytes:
        if self.pool is None:
            return bytes(num_bytes)  # the worker is gone: whatever this reads, its transfer has ended
        side, _ = self.pool.rows.get(offset, (None, b""))
        is_held = side is not None and side.request.transfer == transfer
        may_be_late = self.is_dead or self.world.judge.is_overdue(self, transfer)
        check(is_held or may_be_late, "source read too late", f"transfer {transfer} does not hold pool byte {offset}")
        return self.pool.read(offset, num_bytes)

    def write_reported(self, write: SimWrite, outcome: Outcome) -> None:
        """The engine has reported a write's end, or it was never posted."""
        if outcome is Outcome.UNKNOWN and write.action.runs is not None and write.can_land:
            self.unproven.append(write)  # it may still read the worker's pages: only a rotation ends that
            return
        # A raw write of a leg that was stopped may have read pages which its worker had got back at the deadline.
        if outcome is Outcome.DONE and not write.action.cancel.is_set:
            link = self.links.get(write.action.peer)
            if link is not None:
                link.to_decode.send(write.action.notice)
        self._write_ended(write, outcome)

    def _write_ended(self, write: SimWrite, outcome: Outcome) -> None:
        write.is_ended = True
        self.world.judge.write_ended(write, outcome)
        del self.writes[write.action.operation]
        self.core.write_ended(write.action.operation, outcome, "as reported", self.clock.now)

    def is_touching(self, transfer: str) -> bool:
        return any(each.transfer == transfer for each in self.gathers.values())

    def is_pool_quiet(self) -> bool:
        return self.core.num_reading_pool == 0

    def links_of(self) -> Iterable[Link]:
        return self.links.values()

    def check(self) -> None:
        check_sender_slots(self)

    # ---- time ----

    def tick(self) -> None:
        for peer, link in list(self.links.items()):
            if self.is_silent(peer, not (link.is_closed or link.decode.is_dead or link.decode.is_paused)):
                self._lose_peer(peer, Reason.PEER_LOST)
                self.collect()
        self._rotate_if_needed()
        self.core.tick(self.clock.now)

    def _rotate_if_needed(self) -> None:
        """Replace the engine object where a slot, or in mode raw a page, waits for that; healthy writes go first."""
        if not (self.slots.count(SlotState.QUARANTINED) or self.unproven):
            return
        if any(write.state is WriteState.POSTED and not write.is_reported for write in self.writes.values()):
            return
        self.world.engines.cut(self)
        unproven, self.unproven = self.unproven, []
        for write in unproven:
            self._write_ended(write, Outcome.FAILED)
            self.collect()
        self.core.rotated(self.clock.now)

    def is_quiet(self) -> bool:
        core = self.core
        return not (
            self.has_work or self.gathers or self.writes or core.transfers or self.slots.num_free < self.slots.num_slots
        )
