"""The decode agent of the simulation: it performs what a real `DecodeCore` asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from kvxfer.control.messages import Ping, PrefillToDecode, Source
from kvxfer.decode.actions import Action, Notify, PairWith, Pull, Scatter, SendToPeer
from kvxfer.decode.core import DecodeCore
from kvxfer.decode.receive import SourceInfo
from kvxfer.errors import IntegrityError
from kvxfer.integrity import check_segment
from kvxfer.prefill.leg import Mode
from kvxfer.slots import LANDING_MOVES
from kvxfer.transfer import EventKind, Reason
from tests.simulation import pairing
from tests.simulation.agent import PEER_TIMEOUT_S, SimAgent, WatchedSlots
from tests.simulation.executor import Executor, Operation
from tests.simulation.judge import check_landing_slots
from tests.simulation.network import Link
from tests.simulation.pull import PullOperation, SharedPool
from tests.simulation.topology import SLOT_BYTES
from tests.simulation.violation import check

if TYPE_CHECKING:
    from tests.simulation.prefill_agent import SimPrefill
    from tests.simulation.world import World

PING_EVERY_TICKS = 3


@dataclass(slots=True, eq=False)
class _Source:
    """A prefill agent that this one talks to."""

    link: Link
    expected: str
    began_at: float
    is_paired: bool = False
    untaken: pairing.Rotated | None = None  # where the slots lie now, until it says that it knows
    shared: SharedPool | None = None  # its pool, where it is mapped here


class SimDecode(SimAgent[Action]):
    """One run of a decode agent, rank `rank` of decode group `group_idx`."""

    def __init__(self, world: World, group_idx: int, rank: int, incarnation: str) -> None:
        setup = world.setup
        super().__init__(world, f"decode {group_idx}.{rank}", incarnation, setup.num_landing_slots)
        self.group_idx = group_idx
        self.rank = rank
        self.world_size = len(setup.topology.decode[group_idx])
        self.epoch = 0  # of the engine object
        self.slots = WatchedSlots(
            setup.num_landing_slots, LANDING_MOVES, lambda slot, state: world.judge.landing_slot(self, slot, state)
        )
        self.core = DecodeCore(self.slots, setup.credits_per_leg)
        self.scatters: dict[int, Operation] = {}
        self._sources: dict[str, _Source] = {}  # by the incarnation that the ticket named
        self._num_ticks = 0
        self.num_links = 0
        threads = setup.num_threads, world.faults, setup.rows
        self._executor = Executor(self, *threads, self._scatter, self._scattered, lambda _: None, self._recheck)

    # ---- the worker ----

    def lose_worker(self) -> None:
        self.core.worker_lost(self.clock.now)
        self.collect()
        self._lose_all(Reason.WORKER_LOST)

    def begin_drain(self) -> None:
        self.core.is_draining = True

    def is_drained(self) -> bool:
        return not self.core.receives

    def fail_all(self) -> None:
        self.core.fail_all(Reason.SHUTDOWN, "it ends", self.clock.now)

    def say_goodbye(self) -> None:
        self._lose_all(Reason.SHUTDOWN)

    # ---- peers ----

    def received(self, link: Link, message: object) -> None:
        """A message of a prefill agent has arrived."""
        source = next((each for each in self._sources.values() if each.link is link), None)
        if source is None:
            return
        match message:
            case pairing.Welcome() if not source.is_paired:
                source.is_paired = True
                self.heard_at[source.expected] = self.clock.now
                route = self.world.setup.topology.route(link.prefill.idx, self.group_idx, self.rank)
                source.shared = self._map_pool(link.prefill)
                layout = source.shared.pool.layout if source.shared else None
                self.core.peer_paired(SourceInfo(source.expected, route, SLOT_BYTES, layout), self.clock.now)
            case pairing.Refused() if not source.is_paired:
                self._lose_peer(source.expected, message.reason)
            case pairing.RotationTaken():
                if source.untaken is not None and source.untaken.epoch == message.epoch:
                    source.untaken = None
            case pairing.Goodbye():
                self._lose_peer(source.expected, Reason.PEER_LOST)
            case _ if source.is_paired:
                judge = self.world.judge
                before = judge.before_message(self, message)
                self.core.receive(source.expected, cast(PrefillToDecode, message), self.clock.now)
                judge.after_message(self, before)

    def _pair(self, wanted: Source) -> None:
        if wanted.incarnation in self._sources:
            return
        prefill = self.world.prefill_at(wanted.endpoint)
        self.num_links += 1
        link = Link(prefill, self, self.world.faults, self.world.setup.control)
        self._sources[wanted.incarnation] = _Source(link, wanted.incarnation, self.clock.now)
        link.to_prefill.send(pairing.Hello(wanted.incarnation, self.epoch))

    def _lose_peer(self, incarnation: str, reason: Reason) -> None:
        source = self._sources.pop(incarnation, None)
        if source is None:
            return
        for receive in self.core.receives.values():
            if any(leg.source.incarnation == incarnation for leg in receive.legs):
                self.world.taint_transfer(receive.transfer)
        for abort in self.core.aborts_for(incarnation, reason, "as the simulation says"):
            source.link.to_prefill.send(abort)
        source.link.to_prefill.send(pairing.Goodbye())
        source.link.is_closed = True
        self.core.peer_gone(incarnation, reason, "it is lost", self.clock.now)
        self.collect()

    def _lose_all(self, reason: Reason) -> None:
        for incarnation in list(self._sources):
            self._lose_peer(incarnation, reason)

    # ---- actions ----

    def new_actions(self) -> list[Action]:
        actions = self.core.take_actions()
        for action in actions:
            self.world.judge.decode_action(self, action)
        return actions

    def emitted_scatter(self, scatter: Scatter, transfer: str) -> None:
        """Note a scatter from its emission on."""
        self.scatters[scatter.operation] = Operation(
            scatter.operation,
            scatter.slot,
            transfer,
            scatter.source,
            scatter.segment,
            scatter.cancel,
            self.sides.get(transfer),
            scatter.notice,
        )

    def emitted_pull(self, pull: Pull, transfer: str) -> None:
        """Note a pull from its emission on."""
        side = self.sides.get(transfer)
        self.scatters[pull.operation] = PullOperation(
            pull.operation,
            -1,
            transfer,
            pull.source,
            0,
            pull.cancel,
            side,
            src_addresses=pull.src_addresses,
            lease=pull.lease,
        )

    def perform(self, action: Action) -> None:
        match action:
            case SendToPeer():
                source = self._sources.get(action.peer)
                if source is not None:
                    source.link.to_prefill.send(action.message)
            case Notify():
                self._notify(action)
            case PairWith():
                self._pair(action.source)
            case Scatter():
                self._executor.submit(self.scatters[action.operation])
            case Pull():
                self._pull(action)

    def _notify(self, notify: Notify) -> None:
        side = self.sides.pop(notify.event.transfer, None)
        if side is None or self.pool is None:
            return
        if notify.event.event is EventKind.LANDED:
            self.pool.check_complete(side)
        self.pool.release(side)
        side.request.ended(side, notify.event)

    # ---- slots and operations ----

    def write_slot(self, slot: int, content: bytes) -> None:
        """An engine's write lands."""
        self.world.judge.landing(self, slot)
        self.memory[slot][: len(content)] = content

    def _scatter(self, operation: Operation) -> None:
        """The bytes move, in a thread."""
        if self.pool is None:
            return  # the worker is gone, and nobody looks at its pages any more
        if isinstance(operation, PullOperation):
            assert operation.shared is not None
            operation.is_copied = True
            for (dst, _, num_bytes), (src, _, _) in zip(operation.copies(), operation.src_copies(), strict=True):
                self.pool.write_pulled(dst, operation.shared.pool.read(src, num_bytes), operation.owner)
            return
        slot = self.memory[operation.slot]
        assert operation.notice is not None
        if self.world.setup.verify:
            try:
                check_segment(operation.notice, np.frombuffer(slot, dtype=np.uint8))
            except IntegrityError as error:
                operation.corruption = str(error)
                return
        for pool_offset, slot_offset, num_bytes in operation.copies():
            self.pool.write(pool_offset, bytes(slot[slot_offset : slot_offset + num_bytes]), operation.owner)

    def _map_pool(self, prefill: SimPrefill) -> SharedPool | None:
        is_near = self.world.setup.mode is Mode.AUTO and self.world.choices.pick(4) < 3
        return SharedPool(prefill.pool, prefill.leases) if is_near and prefill.pool is not None else None

    def _pull(self, pull: Pull) -> None:
        operation = self.scatters[pull.operation]
        assert isinstance(operation, PullOperation)
        source = self._sources.get(pull.peer)
        if source is None or source.shared is None:
            self._scattered(operation, "the source's pool is not mapped any more", False)
        else:
            operation.shared = source.shared
            self._executor.submit(operation)

    def _recheck(self, operation: Operation) -> str | None:
        """After the rows were copied: do they count?"""
        if not isinstance(operation, PullOperation) or operation.shared is None:
            return operation.corruption
        return None if operation.shared.is_leased(operation.lease) else "the lease was revoked"

    def _scattered(self, operation: Operation, error: str | None, was_begun: bool) -> None:  # noqa: ARG002
        del self.scatters[operation.operation]
        if error is not None:
            self.world.taint_transfer(operation.transfer)
        receive = self.core._moves._running[operation.operation].receive
        is_corrupt = operation.corruption is not None
        expected = Reason.CORRUPT if is_corrupt and receive.is_open else receive.reason
        self.core.scatter_ended(operation.operation, self.clock.now, 0.0, error, is_corrupt=is_corrupt)
        check(not is_corrupt or receive.reason is expected, "corrupt segment", f"{receive.transfer}: {receive.reason}")

    def is_touching(self, transfer: str) -> bool:
        return any(each.transfer == transfer for each in self.scatters.values())

    def is_pool_quiet(self) -> bool:
        return self.core.num_touching_pool == 0

    def links_of(self) -> Iterable[Link]:
        return [source.link for source in self._sources.values()]

    def check(self) -> None:
        check_landing_slots(self)

    # ---- time ----

    def tick(self) -> None:
        self._num_ticks += 1
        now = self.clock.now
        for incarnation, source in list(self._sources.items()):
            prefill = source.link.prefill
            if not source.is_paired:
                if now - source.began_at > PEER_TIMEOUT_S:
                    self._lose_peer(incarnation, Reason.PEER_UNREACHABLE)
            elif self.is_silent(incarnation, not (prefill.is_dead or prefill.is_paused)):
                self._lose_peer(incarnation, Reason.PEER_LOST)
            elif self._num_ticks % PING_EVERY_TICKS == 0:
                if source.untaken is not None:
                    source.link.to_prefill.send(source.untaken)  # again: it may have been lost
                source.link.to_prefill.send(Ping(incarnation=self.incarnation, floor=self.core.floor()))
        if self.core.may_renew_slots:
            self._rotate()
        self.core.tick(now)

    def _rotate(self) -> None:
        """Replace the engine object. No credit is out, so no healthy peer's write is lost by it."""
        self.epoch += 1
        for source in self._sources.values():
            source.untaken = pairing.Rotated(self.epoch)
            source.link.to_prefill.send(source.untaken)
        self.core.slots_lie_in(self.epoch)
        self.core.rotated()

    def is_quiet(self) -> bool:
        core = self.core
        return not (self.has_work or self.scatters or core.receives or self.slots.num_free < self.slots.num_slots)
