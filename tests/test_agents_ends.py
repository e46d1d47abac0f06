"""Real agents when a transfer does not go well: one terminal event a side, quiet pages, and the next one is exact."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvxfer.control.client import _Client
from kvxfer.control.client_requests import open_request, reject_request
from kvxfer.control.messages import Ticket, TransferEvent
from kvxfer.decode.agent import DecodeAgent
from kvxfer.decode.core import DecodeCore
from kvxfer.errors import AgentLostError
from kvxfer.operations import CancelFlag
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.loopback import LoopbackTransport
from kvxfer.transports.loopback_options import LoopbackFaults
from tests.agent_world import WAIT_S, AgentWorld, receive_pages
from tests.patience import SOON_S, until
from tests.test_agents import Split, build


def ends(client: _Client, ticket: Ticket) -> TransferEvent:
    """The terminal event, and proof that no second one follows."""
    event = client.wait(ticket, WAIT_S)
    assert client.next_event(0.15) is None
    return event


class _Gate:
    """Holds the row mover of an agent until it is opened; what stands before it is a move under way."""

    def __init__(self, agent: PrefillAgent | DecodeAgent) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        mover = agent._sidecar.mover
        submit, submit_all = mover.submit, mover.submit_all

        def held(operation: int, segment: int, cancel: CancelFlag, move: Callable[[], object]) -> None:
            submit(operation, segment, cancel, partial(self._hold, move))

        def all_held(operation: int, cancel: CancelFlag, moves: list[Callable[[], object]]) -> None:
            submit_all(operation, cancel, [partial(self._hold, move) for move in moves])

        mover.submit, mover.submit_all = held, all_held  # type: ignore[method-assign]

    def _hold(self, move: Callable[[], object]) -> None:
        self.reached.set()
        assert self._open.wait(WAIT_S)
        move()

    def open(self) -> None:
        self._open.set()


def _faults(agent: PrefillAgent, faults: LoopbackFaults) -> None:
    """What becomes of writes from now on; pairing has been done."""
    transport = agent._sidecar.transport
    assert isinstance(transport, LoopbackTransport)
    transport._faults = faults


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_ends_both_sides_and_the_next_transfer_is_exact(tmp_path: Path, side: str) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2))
        request = world.begin(40)
        world.submit(request, 0, 20)
        aborting = world.prefill[0][1] if side == "prefill" else world.decode[0][1]
        aborting.abort(request.ticket)
        aborting.abort(request.ticket)
        clients = [client for _, client in (*world.prefill, *world.decode)]
        for client in clients:
            event = ends(client, request.ticket)
            assert event.event is (EventKind.ABORTED if client is aborting else EventKind.FAILED)
        for seat, _ in world.decode:
            seat.expected[:] = seat.memory.array  # some rows of the first chunk may be there
        world.move(40, salt=9)


@pytest.mark.parametrize("late", ["prefill", "decode"])
def test_a_deadline_ends_both_sides_in_time(tmp_path: Path, late: str) -> None:
    """The chunk that would complete the transfer never comes; each side judges by its own clock, plus one tick."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2))
        began_s = time.monotonic()
        request = world.begin(40, deadline_s=0.5)
        if late == "decode":
            world.submit(request, 0, 20)
        reasons = {ends(client, request.ticket).reason for _, client in (*world.prefill, *world.decode)}
        assert Reason.DEADLINE in reasons  # the first one judges by its clock and tells the others
        assert reasons <= {Reason.DEADLINE, Reason.ABORTED_BY_PEER}
        assert 0.4 < time.monotonic() - began_s < SOON_S


def test_a_prefill_worker_that_goes_is_replaced_once_its_pool_is_quiet(tmp_path: Path) -> None:
    """The gather under way keeps the pool mapped; the next worker waits for it, then serves."""
    with AgentWorld(tmp_path) as world:
        split = Split(dst_size=2)
        build(world, split)
        world.move(10)
        agent = world.threads[tmp_path / "p0"].agent
        assert isinstance(agent, PrefillAgent)
        gate = _Gate(agent)
        request = world.begin(40)
        world.submit(request, 0, 20)
        assert gate.reached.wait(WAIT_S)
        # A grant that comes after the worker has gone finds an agent which has given its peer up: another reason.
        until(lambda: len(agent._core.transfers[request.ticket.transfer].legs) == 2, "both ranks have asked")
        world.prefill.pop()[1].close()
        for _, client in world.decode:
            assert ends(client, request.ticket).reason is Reason.WORKER_LOST
        joining = threading.Thread(target=world.join_prefill, args=("p0", split.sources()[0]))
        joining.start()
        joining.join(0.3)
        assert joining.is_alive()
        assert agent._sidecar.desk.seat.is_leaving
        gate.open()
        joining.join(WAIT_S)
        assert not agent._sidecar.desk.seat.is_leaving
        world.move(40, salt=7)


def test_a_decode_worker_that_goes_is_replaced_once_its_pool_is_quiet(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        split = Split()
        build(world, split)
        world.move(10)
        agent = world.threads[tmp_path / "d0"].agent
        gate = _Gate(agent)
        request = world.begin(40)
        world.submit(request, 0, 20)
        assert gate.reached.wait(WAIT_S)
        world.decode.pop()[1].close()
        assert ends(world.prefill[0][1], request.ticket).event is EventKind.FAILED
        joining = threading.Thread(target=world.join_decode, args=("d0", split.target(0)))
        joining.start()
        joining.join(0.3)
        assert joining.is_alive()
        gate.open()
        joining.join(WAIT_S)
        world.move(40, salt=7)


@pytest.mark.parametrize("asked", ["open", "reject"])
def test_a_decode_worker_that_asks_and_goes_in_one_turn_of_its_agent(tmp_path: Path, asked: str) -> None:
    """The agent has yet to meet the source: it does, which hears of the end at once, and serves the next worker."""
    with AgentWorld(tmp_path) as world:
        split = Split()
        build(world, split)
        agent = world.threads[tmp_path / "d0"].agent
        source = world.prefill[0][1]
        ticket = source.ticket()
        seat, leaving = world.decode.pop()
        pages = receive_pages(seat.take_pages(world.ranges(seat.layout, 0, 20)))
        held, go_on = threading.Event(), threading.Event()
        tick = agent.tick

        def hold(now: float) -> None:
            agent.tick = tick  # type: ignore[method-assign]
            held.set()
            assert go_on.wait(WAIT_S)
            tick(now)

        agent.tick = hold  # type: ignore[method-assign]
        assert held.wait(WAIT_S)
        leaving._core.request(open_request(ticket, pages, 60.0) if asked == "open" else reject_request(ticket))
        leaving._link.flush()
        time.sleep(0.05)  # until it is in the agent's queue
        leaving.close()
        go_on.set()
        event = source.wait(ticket, SOON_S)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.ABORTED_BY_PEER)
        until(agent.is_drained, "its leg is closed")
        world.join_decode("d0", split.target(0))
        world.move(20)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_agent_that_stops_ends_every_open_transfer_once(tmp_path: Path, name: str) -> None:
    """Its own worker hears `shutdown` or `agent_lost`, the other side at once, not by its deadline."""
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        world.move(20)  # the agents know each other now
        requests = [world.begin(20), world.begin(20)]
        world.submit(requests[0], 0, 10)
        began_s = time.monotonic()
        world.end_agent(name)
        for _, client in (*world.prefill, *world.decode):
            for request in requests:
                event = client.wait(request.ticket, WAIT_S)
                assert event.event is EventKind.FAILED
                assert event.reason in (Reason.SHUTDOWN, Reason.AGENT_LOST, Reason.PEER_LOST, Reason.ABORTED_BY_PEER)
        assert time.monotonic() - began_s < SOON_S
        own, other = (world.prefill, world.decode) if name == "p0" else (world.decode, world.prefill)
        assert other[0][1].next_event(0.15) is None
        with pytest.raises(AgentLostError):
            own[0][1].next_event(0.15)


def test_a_goodbye_to_an_agent_that_was_held_up_is_explained(tmp_path: Path) -> None:
    """Its worker reads that the fault lies here."""
    with AgentWorld(tmp_path) as world:
        split = Split()
        prefill = world.start_prefill("p0")
        world.join_prefill("p0", split.target(0))
        decode = world.start_decode("d0", peer_timeout_s=0.5)
        _, client = world.join_decode("d0", split.target(0))
        world.move(20)
        request = world.begin(20)
        has_lost = threading.Event()

        def lose(now: float) -> None:
            del prefill.tick
            prefill._links.lose_all(Reason.PEER_LOST, now)
            has_lost.set()

        def hold(now: float) -> None:
            del decode.tick
            time.sleep(0.3)
            prefill.tick = lose  # type: ignore[method-assign]
            assert has_lost.wait(WAIT_S)
            decode.tick(now)

        decode.tick = hold  # type: ignore[method-assign]
        event = ends(client, request.ticket)
        assert event.reason is Reason.PEER_LOST
        assert "it said goodbye, after this agent itself was stopped or held up for" in event.detail


@pytest.mark.parametrize("has_worker", [True, False])
def test_who_opens_a_ticket_of_an_agent_that_drains_hears_of_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_worker: bool
) -> None:
    """The listener stays up for those, with its worker or without; then the agent ends though its time is not over."""
    monkeypatch.setattr("kvxfer.prefill.agent._LATE_OPENS_S", SOON_S)
    with AgentWorld(tmp_path) as world:
        build(world, Split(), drain_s=60.0)
        (seat, client), (_, prefill_client) = world.decode[0], world.prefill[0]
        ticket = prefill_client.ticket()
        agent = world.threads[tmp_path / "p0"].agent
        agent.stop()
        assert ends(prefill_client, ticket).reason is Reason.SHUTDOWN
        if not has_worker:
            prefill_client.close()
            until(lambda: agent._sidecar.pool is None, "the worker is gone")
        began_s = time.monotonic()
        client.open(ticket, receive_pages(seat.take_pages(world.ranges(seat.layout, 0, 8))))
        event = ends(client, ticket)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.SHUTDOWN)
        assert "the prefill agent is shutting down" in event.detail
        assert time.monotonic() - began_s < SOON_S
        thread = world.threads[tmp_path / "p0"]._thread
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (LoopbackFaults(fail=1.0), Reason.WRITE_FAILED),
        (LoopbackFaults(truncate=1.0), Reason.WRITE_FAILED),
        (LoopbackFaults(late=1.0, late_s=0.2), Reason.WRITE_UNKNOWN),
        (LoopbackFaults(drop=1.0), Reason.DEADLINE),
    ],
    ids=["fail", "truncate", "late", "drop"],
)
def test_a_write_that_goes_wrong_fails_its_transfer_alone(
    tmp_path: Path, faults: LoopbackFaults, reason: Reason
) -> None:
    """Late bytes fall into slots that nobody reads; pages stay as they were, and the next transfer is exact."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(), num_slots=8)
        world.move(10)
        agent = world.threads[tmp_path / "p0"].agent
        assert isinstance(agent, PrefillAgent)
        _faults(agent, faults)
        request = world.begin(20, deadline_s=1.0 if reason is Reason.DEADLINE else WAIT_S)
        world.submit(request, 0, 20)
        reasons = {ends(client, request.ticket).reason for _, client in (*world.prefill, *world.decode)}
        assert reason in reasons
        assert reasons <= {reason, Reason.ABORTED_BY_PEER}
        _faults(agent, LoopbackFaults())
        world.move(40, salt=3)
        time.sleep(0.25)
        world.verify()


def test_quarantined_slots_come_back(tmp_path: Path) -> None:
    """Unknown writes until the cap on both sides: landing slots move, the sender gets a new engine, all are free."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(), num_slots=4)
        world.move(10)
        sender, receiver = (world.threads[tmp_path / name].agent for name in ("p0", "d0"))
        assert isinstance(sender, PrefillAgent)
        _faults(sender, LoopbackFaults(late=1.0, late_s=0.05))
        request = world.begin(40)
        world.submit(request, 0, 40)
        for _, client in (*world.prefill, *world.decode):
            assert ends(client, request.ticket).reason is Reason.WRITE_UNKNOWN
        _faults(sender, LoopbackFaults())
        tables = sender._core._life.sender.slots, receiver._core._life.lender.slots  # type: ignore[union-attr]
        deadline_s = time.monotonic() + 8.0
        while any(table.num_free < 4 for table in tables) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert [table.count(SlotState.QUARANTINED) for table in tables] == [0, 0]
        world.move(40, salt=2)


def test_a_decode_agent_that_is_stuck_does_not_stop_another(tmp_path: Path) -> None:
    """Its scatters hang and its credits run out; the other decode agent's transfers pass it by."""
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        world.start_decode("d1")
        world.join_decode("d1", Split().target(0))
        stuck, lively = world.decode
        gate = _Gate(world.threads[tmp_path / "d0"].agent)
        world.decode = [stuck]
        request = world.begin(60)
        world.submit(request, 0, 60)
        assert gate.reached.wait(WAIT_S)
        world.decode = [lively]
        for salt in range(3):
            world.move(60, salt=salt)
        gate.open()
        world.decode = [stuck]
        world.finish(request)
        world.verify()


def test_two_decode_workers_that_abort_one_transfer_are_both_answered(tmp_path: Path) -> None:
    """The sender has forgotten the transfer by the second abort; every leg is closed all the same."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2))
        world.move(10)
        request = world.begin(40)
        world.submit(request, 0, 20)
        for _, aborting in world.decode:
            aborting.abort(request.ticket)
        for _, client in (*world.prefill, *world.decode):
            assert ends(client, request.ticket).event in (EventKind.ABORTED, EventKind.FAILED)
        for seat, _ in world.decode:
            seat.expected[:] = seat.memory.array
        world.move(40, salt=9)
        for name in ("d0", "d1"):
            core = world.threads[tmp_path / name].agent._core
            assert isinstance(core, DecodeCore)
            assert not core.receives
            assert core._life.lender.slots.num_free == 4
