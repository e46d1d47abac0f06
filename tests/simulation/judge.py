"""The invariants, judged by one who sees everything. The numbers are those of the list in the package's docstring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.control.messages import Finished, Quiesced
from kvxfer.decode import actions as decode_actions
from kvxfer.decode.receive import Receive
from kvxfer.prefill import actions as prefill_actions
from kvxfer.prefill.leg import Leg
from kvxfer.slots import SlotState, SlotTable
from kvxfer.transfer import EventKind
from kvxfer.transports.base import Outcome
from tests.simulation.engine import LegId, SimWrite, WriteState
from tests.simulation.executor import Operation
from tests.simulation.violation import InvariantBroken, check

if TYPE_CHECKING:
    from kvxfer.control.messages import TransferEvent
    from tests.simulation.agent import SimAgent
    from tests.simulation.decode_agent import SimDecode
    from tests.simulation.prefill_agent import SimPrefill
    from tests.simulation.world import World

_SENDER_REUSE = frozenset({SlotState.FREE, SlotState.FILLING})
_LANDING_REUSE = frozenset({SlotState.FREE, SlotState.CREDITED, SlotState.SCATTERING})


@dataclass(slots=True)
class LegBook:
    """Operations of one leg of one prefill agent, and what was said of it."""

    num_emitted: int = 0
    num_posted: int = 0  # begun: what an executor, unlike the core, could count
    num_ended: int = 0
    is_quiesced: bool = False
    is_finished: bool = False


class Judge:
    """Raises `InvariantBroken`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.legs: dict[LegId, LegBook] = {}
        self._overdue: set[tuple[str, str]] = set()  # prefill agent, transfer: failed while a raw write hangs

    # ---- slots: invariants 3 and 7 ----

    def sender_slot(self, agent: SimPrefill, slot: int, state: SlotState) -> None:
        """A sender slot changes its state."""
        if state in _SENDER_REUSE:
            for write in self._world.engines.writes:
                if write.sender is agent and write.action.src_slot == slot and write.can_land:
                    detail = f"{agent.name}: sender slot {slot} is {state.value} under {write.leg}"
                    raise InvariantBroken("slot reused", detail)

    def landing_slot(self, agent: SimDecode, slot: int, state: SlotState) -> None:
        """A landing slot changes its state."""
        if state in _LANDING_REUSE:
            for write in self._world.engines.writes:
                if write.target is agent and write.action.notice.slot == slot and write.can_land:
                    detail = f"{agent.name}: landing slot {slot} is {state.value} under {write.leg}"
                    raise InvariantBroken("slot reused", detail)

    def landing(self, agent: SimDecode, slot: int) -> None:
        """A write lands."""
        state = agent.slots.state(slot)
        expected = state in (SlotState.CREDITED, SlotState.QUARANTINED)
        check(expected, "foreign write", f"{agent.name}: a write lands in slot {slot}, which is {state.value}")

    # ---- the sending side: invariants 2, 4, 5, 6 ----

    def prefill_action(self, agent: SimPrefill, action: prefill_actions.Action) -> None:
        """A prefill core has emitted an action."""
        sender = agent.core._life.sender
        match action:
            case prefill_actions.Gather():
                legs = sender._gathers[action.operation].legs
                for leg in legs:
                    self._emitted(agent, leg)
                self._may_touch(agent, legs[0].transfer)
                agent.emitted_gather(action, legs[0].transfer)
            case prefill_actions.Write():
                self._emitted(agent, sender._writes[action.operation].leg)
                self._may_touch(agent, action.notice.transfer)
                agent.emitted_write(action)
            case prefill_actions.SendToPeer(message=Quiesced() as message):
                book = self._book(agent, action.peer, message.transfer, message.generation)
                counts = f"{message.transfer}: {book.num_emitted} emitted, {book.num_ended} ended"
                check(book.num_emitted == book.num_ended, "quiesced too early", counts)
                book.is_quiesced = True
            case prefill_actions.SendToPeer(message=Finished() as message):
                book = self._book(agent, action.peer, message.transfer, message.generation)
                counts = f"{message.transfer}: {book.num_emitted} emitted, {book.num_ended} ended"
                check(book.num_emitted == book.num_ended, "finished too early", counts)
                book.is_finished = True
            case prefill_actions.Notify():
                self._prefill_event(agent, action.event)

    def _book(self, agent: SimPrefill, peer: str, transfer: str, generation: int) -> LegBook:
        return self.legs.setdefault((agent.incarnation, peer, transfer, generation), LegBook())

    def book(self, agent: SimPrefill, leg: Leg) -> LegBook:
        """What was counted of a leg."""
        return self._book(agent, leg.peer.incarnation, leg.transfer, leg.grant.generation)

    def _emitted(self, agent: SimPrefill, leg: Leg) -> None:
        book = self.book(agent, leg)
        is_over = book.is_quiesced or book.is_finished
        check(not is_over, "emitted after quiesced", f"leg {leg.key} of {agent.name} was declared over")
        book.num_emitted += 1

    def posted(self, write: SimWrite) -> None:
        """A write goes to the engine."""
        book = self.legs[write.leg]
        check(not (book.is_quiesced or book.is_finished), "posted after quiesced", f"{write.leg}")
        notice = write.action.notice
        receive = write.target.core.receives.get(notice.transfer)
        if write.epoch != write.target.epoch and receive is not None and receive.generation == notice.generation:
            is_lent = any(
                leg.source.incarnation == write.sender.incarnation and notice.slot in leg.credits
                for leg in receive.legs
            )
            check(not is_lent, "written to an old region", f"{write.leg}: slot {notice.slot} was lent in the new one")

    def begun(self, agent: SimPrefill, legs: tuple[Leg, ...]) -> None:
        """An operation of these legs has been begun, or given up, by its executor."""
        for leg in legs:
            self.book(agent, leg).num_posted += 1

    def gather_ended(self, agent: SimPrefill, operation: Operation) -> None:
        """The core is about to hear of the end of a gather."""
        for leg in agent.core._life.sender._gathers[operation.operation].legs:
            self.book(agent, leg).num_ended += 1

    def write_ended(self, write: SimWrite, outcome: Outcome) -> None:
        """The core is about to hear of the end of a write."""
        proven = outcome is Outcome.UNKNOWN or not write.can_land
        check(proven, "simulation", f"{write.leg}: an end was reported that is none")
        self.legs[write.leg].num_ended += 1

    def _may_touch(self, agent: SimAgent[Any], transfer: str) -> None:
        side = agent.sides.get(transfer)
        has_ended = side is None or side.end is not None
        check(not has_ended, "action after the end", f"{agent.name}: {transfer} has ended, or nobody knows it")

    def _prefill_event(self, agent: SimPrefill, event: TransferEvent) -> None:
        gathers = [each for each in agent.gathers.values() if each.transfer == event.transfer]
        check(not gathers, "event over gathers", f"{agent.name}: {event.event} while {len(gathers)} gathers run")
        side = agent.sides.get(event.transfer)
        writes = [each for each in agent.writes.values() if each.action.notice.transfer == event.transfer]
        readers = [each for each in writes if each.action.runs is not None]
        if event.event is EventKind.SOURCE_FREE:
            check(not readers, "event over readers", f"{agent.name}: {len(readers)} raw writes read its pages")
            check(side is not None and side.end is None, "second event", f"{agent.name}: {event}")
            return
        self._terminal(agent, event)
        if event.event is EventKind.SENT:
            check(not writes, "sent too early", f"{agent.name}: {len(writes)} writes run")
        elif readers:
            is_late = side is not None and self._world.clock.now >= side.deadline
            check(is_late, "event over readers", f"{agent.name}: {len(readers)} raw writes read its pages")
            self._overdue.add((agent.incarnation, event.transfer))

    def is_overdue(self, agent: SimPrefill, transfer: str) -> bool:
        """Whether the transfer had to fail at its deadline although a raw write still reads its pages."""
        return (agent.incarnation, transfer) in self._overdue

    def _terminal(self, agent: SimAgent[Any], event: TransferEvent) -> None:
        side = agent.sides.get(event.transfer)
        check(side is not None, "second event", f"{agent.name}: {event.event} of a transfer that nobody waits for")
        assert side is not None
        check(side.end is None, "second event", f"{agent.name}: {event.event} after {side.end}")
        side.end = event.event

    # ---- the receiving side: invariants 1, 2, 4, 5, 8 ----

    def decode_action(self, agent: SimDecode, action: decode_actions.Action) -> None:
        """A decode core has emitted an action."""
        match action:
            case decode_actions.Scatter():
                transfer = agent.core._moves._running[action.operation].receive.transfer
                self._may_touch(agent, transfer)
                agent.emitted_scatter(action, transfer)
            case decode_actions.Pull():
                transfer = agent.core._moves._running[action.operation].receive.transfer
                self._may_touch(agent, transfer)
                agent.emitted_pull(action, transfer)
            case decode_actions.Notify():
                scatters = [each for each in agent.scatters.values() if each.transfer == action.event.transfer]
                detail = f"{agent.name}: {action.event.event} while {len(scatters)} scatters run"
                check(not scatters, "event over scatters", detail)
                self._terminal(agent, action.event)

    def before_message(self, agent: SimDecode, message: object) -> tuple[Receive, object] | None:
        """What a message of another generation must leave as it is."""
        receive = agent.core.receives.get(getattr(message, "transfer", ""))
        if receive is None or receive.generation == getattr(message, "generation", 0):
            return None
        return receive, _state(receive)

    def after_message(self, agent: SimDecode, before: tuple[Receive, object] | None) -> None:
        """The message was handled."""
        if before is not None:
            receive, state = before
            check(_state(receive) == state, "stale message obeyed", f"{agent.name}: {receive.transfer}")

    # ---- time: invariant 4 ----

    def deadlines(self, agent: SimAgent[Any]) -> None:
        """A tick of the agent has passed."""
        now = self._world.clock.now
        for transfer, side in agent.sides.items():
            if side.end is None and now >= side.deadline:
                detail = f"{agent.name}: {transfer} is open at {now}, its deadline was {side.deadline}"
                check(agent.is_touching(transfer), "no terminal event", detail)


def _state(receive: Receive) -> object:
    legs = [
        (leg.is_closed, frozenset(leg.credits), leg.num_wanted, len(leg.chunks), leg.finished) for leg in receive.legs
    ]
    return receive.state, receive.num_scattering, legs


def check_sender_slots(agent: SimPrefill) -> None:
    """Invariant 7: every sender slot is in exactly the state that its users say."""
    sender, slots = agent.core._life.sender, agent.slots
    filling = {op.lease.slot for op in sender._gathers.values()}
    held = {op.lease.slot for op in sender._writes.values() if op.lease is not None}
    for transfer in agent.core.transfers.values():
        for leg in transfer.legs.values():
            held |= {packed.lease.slot for packed in leg.packed if packed.lease is not None}
    for slot, state in enumerate(slots._states):
        if state is SlotState.FILLING:
            right = slot in filling and slot not in held
        elif state in (SlotState.READY, SlotState.IN_FLIGHT):
            right = slot in held and slot not in filling
        else:
            right = slot not in filling and slot not in held and _is_set_aside(slots, slot, state)
        if not right:
            raise InvariantBroken("slot state", f"{agent.name}: slot {slot} is {state}, filling {filling}, held {held}")


def check_landing_slots(agent: SimDecode) -> None:
    """Invariants 7 and R17: every landing slot is in exactly the state that its users say."""
    core, slots = agent.core, agent.slots
    scattering = [move.slot for move in core._moves._running.values() if move.slot is not None]
    credited: list[int] = []
    for receive in core.receives.values():
        for leg in receive.legs:
            credited += leg.credits
            if len(leg.credits) > agent.world.setup.credits_per_leg:
                raise InvariantBroken("too many credits", f"{agent.name}: {leg.credits}")
    for slot, state in enumerate(slots._states):
        uses = credited.count(slot), scattering.count(slot)
        if state is SlotState.CREDITED:
            right = uses == (1, 0)
        elif state is SlotState.SCATTERING:
            right = uses == (0, 1)
        else:
            right = uses == (0, 0) and _is_set_aside(slots, slot, state)
        if not right:
            raise InvariantBroken("slot state", f"{agent.name}: slot {slot} is {state}, {credited}, {scattering}")


def _is_set_aside(slots: SlotTable, slot: int, state: SlotState) -> bool:
    """Whether a slot that nobody uses is quarantined exactly where the table says so, and otherwise free."""
    return state is (SlotState.QUARANTINED if slot in slots._quarantine else SlotState.FREE)


def check_at_rest(world: World) -> None:
    """Invariants 6 and 7: nothing is left of what has ended."""
    for prefill in world.prefills:
        sender = prefill.core._life.sender
        rest = sender._turns or sender._gathers or sender._writes or any(sender._num_held.values())
        check(not rest, "left over", f"{prefill.name}: {sender.__dict__}")
        for peer in prefill.core.peers.values():
            check(not (peer.legs or peer.tombstones), "left over", f"{prefill.name}: {peer}")
    for decode in world.decodes:
        lender = decode.core._life.lender
        check(not (lender._turns or decode.core._moves.num_running), "left over", f"{decode.name}: {lender.__dict__}")
    alive = {prefill.incarnation for prefill in world.prefills}
    for leg, book in world.judge.legs.items():
        check(leg[0] not in alive or book.num_emitted == book.num_ended, "left over", f"{leg}: {book}")
    for agent in world.agents:
        counts = {state: agent.slots.count(state) for state in SlotState}
        everything = counts[SlotState.FREE] == sum(counts.values()) == agent.slots.num_slots
        check(everything, "left over", f"{agent.name}: {counts}")
    dangling = [each.leg for each in world.engines.writes if each.can_land and each.state is not WriteState.POSTED]
    check(not dangling, "left over", f"writes: {dangling}")
