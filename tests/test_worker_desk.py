"""An agent whose worker moves the rows by its own stream: hand-over, orders, slots that move, and every way to part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer.control.channel import Channel
from kvxfer.control.client import DecodeClient
from kvxfer.control.messages import AbortTransfer, Message, Ok, Open, SlotsMapped, WorkerReply
from kvxfer.control.worker_stream import WorkerStream
from kvxfer.layout import Placement, Shard
from kvxfer.memory import HostMemory
from kvxfer.operations import CancelFlag, Move, Moved
from kvxfer.pool_seat import make_ring
from kvxfer.rows_host import scatter_segment
from kvxfer.streams.ring import OFFSETS_WORD
from kvxfer.streams.stream_mover import StreamMover
from kvxfer.transfer import Reason
from tests.control.core_agent import A, ticket
from tests.control.waiting import num_descriptors
from tests.idle_agent import WAIT_S, IdleAgent, until
from tests.streams.owner import POOL_BYTES, ROW_BYTES, chunk_of
from tests.wire_world import Geometry, GroupSpec, make_layout

LAYOUT = make_layout((GroupSpec("kv", Placement.SHARDED, 1, ROW_BYTES),), Geometry(4), 500, Shard())
NUM_ROWS = 3


class _Agent(IdleAgent):
    """Scatters slot 1 into rows of the pool, once for every `Open`; `moved` are the ends of that."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.moved: list[Moved] = []
        self.num_expected = 0
        self.answer = self._scatter

    def poll(self, *_: object) -> None:
        self.moved += self.sidecar.poll_moves()

    def perform(self, *_: object) -> None:
        super().perform()
        if self.sidecar.pool is not None:
            self.sidecar.rows.expect(self.num_expected, 0)

    def _scatter(self, message: Message) -> WorkerReply:
        if isinstance(message, Open):
            rows = self.sidecar.rows
            rows.expect(1, 0)
            rows.scatter(Move(len(self.moved), chunk_of(NUM_ROWS), 0, CancelFlag()), 1, None)
            rows.expect(0, 0)
        return Ok()

    def only_expect(self, num_moves: int) -> None:
        """Instead, tell the executor that so many moves will follow."""

        def expect(_: Message) -> WorkerReply:
            self.num_expected = num_moves
            self.sidecar.rows.expect(num_moves, 0)
            return Ok()

        self.answer = expect

    def fill(self, value: int) -> None:
        self.sidecar.slots.view(1)[:] = value


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[_Agent]:
    before = num_descriptors(), threading.active_count()
    found = _Agent(tmp_path / "agent")
    found.start()
    yield found
    found.end()
    assert (num_descriptors(), threading.active_count()) == before


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with HostMemory.create(POOL_BYTES, "pool") as found:
        yield found


def _connect(agent: IdleAgent, memory: HostMemory) -> DecodeClient:
    path = agent.sidecar.desk.channel._claim.path.parent
    return DecodeClient.connect(path, memory, LAYOUT, placement="worker", timeout_s=WAIT_S)


def _has_rows(memory: HostMemory, value: int) -> bool:
    """Whether the chunk's rows are all `value`, and no other byte of the pool was touched."""
    expected = np.zeros(POOL_BYTES, dtype=np.uint8)
    source = chunk_of(NUM_ROWS)
    slot = np.full(4096, value, dtype=np.uint8)
    assert scatter_segment(expected, source.plan, source.addresses, 0, slot) == NUM_ROWS * ROW_BYTES
    return bool(np.array_equal(memory.array, expected))


def test_a_worker_attaches_moves_rows_and_goes(agent: _Agent, memory: HostMemory) -> None:
    with _connect(agent, memory) as client:
        pool = agent.sidecar.pool
        assert pool is not None
        assert pool.memory is None
        assert isinstance(agent.sidecar.rows, StreamMover)
        ring = pool.ring
        assert ring is not None
        for value in (5, 6):
            agent.fill(value)
            client.open(ticket(A), {})
            until(lambda value=value: _has_rows(memory, value))  # type: ignore[misc]
        until(lambda: len(agent.moved) == 2)
        assert [each.error for each in agent.moved] == [None, None]
    until(lambda: ring.memory.fd < 0)
    assert [each for each in agent.heard() if isinstance(each, str)] == ["attached", "lost"]
    with _connect(agent, memory) as client:
        agent.fill(7)
        client.open(ticket(A), {})
        until(lambda: _has_rows(memory, 7))


def test_moved_slots_are_used_once_the_worker_has_mapped_them(
    agent: _Agent, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _connect(agent, memory) as client:
        agent.fill(1)
        with monkeypatch.context() as patch:
            patch.setattr(client._link, "_map_moved_slots", lambda: None)
            agent.do(agent.sidecar.renew_slots)
            agent.fill(2)
            client.open(ticket(A), {})
            client._core.tell(SlotsMapped(move=0))  # of an earlier move: proves nothing
            assert client.next_event(0.2) is None
            assert agent.moved == []
            assert not memory.array.any(), "an order was given for slots that the worker does not know"
        client._link.drain()  # what the patch has kept it from seeing
        deadline_s = time.monotonic() + WAIT_S
        while not agent.moved:
            assert client.next_event(0.01) is None
            assert time.monotonic() < deadline_s
        assert _has_rows(memory, 2)


def test_a_worker_that_waited_while_slots_moved_hears_of_it(agent: _Agent, memory: HostMemory) -> None:
    """It was given the slots when it handed over, and attaches when the last one's pool is quiet."""
    agent.is_quiet = False
    _connect(agent, memory).close()
    until(lambda: "lost" in agent.told)
    clients: list[DecodeClient] = []
    joining = threading.Thread(target=lambda: clients.append(_connect(agent, memory)))
    joining.start()
    until(lambda: agent.sidecar.desk.seat.waiting is not None)
    agent.do(agent.sidecar.renew_slots)
    agent.is_quiet = True
    joining.join(WAIT_S)
    with clients[0] as client:
        agent.fill(4)
        client.open(ticket(A), {})
        deadline_s = time.monotonic() + WAIT_S
        while not agent.moved:
            assert client.next_event(0.01) is None
            assert time.monotonic() < deadline_s
        assert _has_rows(memory, 4)


def test_an_agent_that_ends_leaves_no_stream_waiting(
    agent: _Agent, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even that of a worker which does not look."""
    monkeypatch.setattr(WorkerStream, "_watch", lambda *_: None)
    with _connect(agent, memory) as client:
        agent.only_expect(5)
        client.open(ticket(A), {})
        stream = client._link.stream
        assert stream is not None
        ring = stream._ring
        assert ring.num_enqueued == 5
        time.sleep(0.05)
        assert not ring.is_done(0), "entries wait for orders"
        agent.end()
        until(lambda: all(ring.is_done(number) for number in range(5)))
        assert not ring.has_ended, "it was the agent that skipped them"
        assert client.wait(A, WAIT_S).reason is Reason.AGENT_LOST


def test_a_worker_that_is_torn_away_may_still_write(
    agent: _Agent, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is killed: its stream has begun and nobody hears of the end."""
    began, go_on = threading.Event(), threading.Event()

    def execute(*_: object) -> None:
        began.set()
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr("kvxfer.streams.host_stream._copy", execute)
    monkeypatch.setattr(WorkerStream, "_watch", lambda *_: None)
    agent.is_quiet = False
    with _connect(agent, memory) as client:
        client.open(ticket(A), {})
        assert began.wait(WAIT_S)
        client._link.handoff.close()
        until(lambda: "lost" in agent.told and len(agent.moved) == 1)
        assert agent.moved[0].error == "the worker is gone"
        assert agent.sidecar.rows.may_still_move
        go_on.set()
    agent.is_quiet = True
    with _connect(agent, memory):
        assert not agent.sidecar.rows.may_still_move


def test_a_worker_that_leaves_in_good_order_writes_no_more(agent: _Agent, memory: HostMemory) -> None:
    agent.is_quiet = False
    with _connect(agent, memory) as client:
        agent.only_expect(3)
        client.open(ticket(A), {})
    until(lambda: "lost" in agent.told)
    assert not agent.sidecar.rows.may_still_move
    agent.is_quiet = True


def test_what_a_request_leads_to_begins_after_its_answer_and_before_the_next_request(
    agent: _Agent, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = agent.sidecar.desk
    order: list[str] = []

    def serve(*_: object) -> WorkerReply:
        order.append("served")
        return Ok()

    def two_requests(_: Channel, handle: Callable[[bytes, Message, int], None]) -> None:
        for request_id in (1, 2):
            handle(desk._worker or b"", AbortTransfer(transfer=A), request_id)

    def receive_two() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(agent, "worker_request", serve)
            patch.setattr(desk.channel, "send", lambda *_: order.append("answered"))
            patch.setattr(agent, "perform", lambda *_: order.append("performed"))
            desk.receive(two_requests, 0.0)

    with _connect(agent, memory):
        agent.do(receive_two)
    assert order == ["served", "answered", "performed"] * 2


def test_what_was_skipped_by_a_leaving_worker_does_not_count_as_moved(agent: _Agent, memory: HostMemory) -> None:
    with _connect(agent, memory) as client:
        agent.only_expect(1)
        client.open(ticket(A), {})
        stream = client._link.stream
        assert stream is not None
        stream.end()
        assert stream.drain(WAIT_S)
        agent.do(lambda: agent._scatter(Open(ticket=ticket(A), groups=(), deadline_s=1.0)))
        until(lambda: bool(agent.moved))
        assert agent.moved[0].error == "the worker's stream has ended"
        assert not memory.array.any()


def test_a_worker_that_says_it_has_enqueued_what_it_has_not_harms_itself_alone(
    agent: _Agent, memory: HostMemory
) -> None:
    with _connect(agent, memory) as client:
        stream = client._link.stream
        assert stream is not None
        for number in (1 << 40, -5):
            stream._ring.set_num_enqueued(number)
    until(lambda: "lost" in agent.told)
    with _connect(agent, memory) as client:
        agent.fill(3)
        client.open(ticket(A), {})
        until(lambda: _has_rows(memory, 3))


@pytest.mark.parametrize(
    ("row_bytes", "slot_bytes", "max_offsets"),
    [(1152, 8 << 20, 2 * 7281), (576, 4096, 2 * 7), (1, 8 << 20, (1 << 17) - OFFSETS_WORD), (5000, 4096, 1)],
)
def test_lanes_have_room_for_a_slot_and_stay_small(row_bytes: int, slot_bytes: int, max_offsets: int) -> None:
    layout = make_layout((GroupSpec("kv", Placement.SHARDED, 1, row_bytes),), Geometry(4), 4, Shard())
    ring = make_ring(layout, slot_bytes, 8)
    assert ring.num_lanes == 16
    assert max_offsets <= ring.max_offsets < max_offsets + 512, "whole pages"
    assert ring.memory.num_bytes <= (16 << 20) + (1 << 17)
    ring.close()


@pytest.mark.parametrize(("num_slots", "num_lanes"), [(1, 16), (24, 24), (4096, 64)])
def test_each_slot_has_a_lane_within_bounds(num_slots: int, num_lanes: int) -> None:
    ring = make_ring(LAYOUT, 1 << 20, num_slots)
    assert ring.num_lanes == num_lanes
    assert ring.memory.num_bytes <= (16 << 20) + (1 << 17) + num_lanes * 4096
    ring.close()
