"""Clients of a pool whose rows a stream of the worker moves, against an agent that only talks. Each test runs on the
blocking and on the asyncio client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer.control.client import AsyncDecodeClient, AsyncPrefillClient, DecodeClient, PrefillClient
from kvxfer.control.client_requests import submit_request
from kvxfer.control.messages import Message, Open, SlotsMapped, Submit, TransferEvent
from kvxfer.control.worker_stream import MAX_UNFINISHED
from kvxfer.errors import AgentLostError, ContractError, RegistrationError
from kvxfer.memory import HostMemory
from kvxfer.streams.ring import MemoryIndex, OrderCode, Ring, Span
from kvxfer.transfer import EventKind, Reason
from tests.control.blocking import Connect, connect_async
from tests.control.core_agent import A, B, landed, ticket
from tests.control.fake_agent import SLOTS_BYTES, FakeAgent, accept_all
from tests.control.pools import POOL_BYTES, layout

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=["blocking", "asyncio"])
def connect_prefill(request: pytest.FixtureRequest) -> Connect:
    return PrefillClient.connect if request.param == "blocking" else connect_async(AsyncPrefillClient)


@pytest.fixture(params=["blocking", "asyncio"])
def connect_decode(request: pytest.FixtureRequest) -> Connect:
    return DecodeClient.connect if request.param == "blocking" else connect_async(AsyncDecodeClient)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No stream is left running."""
    before = threading.active_count()
    yield
    deadline_s = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class _Orders(FakeAgent):
    """Wants so many entries before it answers a request; answers come after that, as a real agent sends them."""

    def __init__(self, path: Path, totals: list[int], *, is_prefill: bool = True) -> None:
        super().__init__(path, self._wanting, is_prefill=is_prefill)
        self._totals = totals

    def _wanting(self, message: Message) -> list[Message]:
        if isinstance(message, Submit | Open):
            self.want(self._totals.pop(0))
        return accept_all(message)

    @property
    def ring(self) -> Ring:
        return self.rings[-1]


def _skip(ring: Ring, first: int, end: int) -> None:
    for number in range(first, end):
        ring.order(number, OrderCode.SKIP)


def _until_done(ring: Ring, number: int) -> None:
    deadline_s = time.monotonic() + 5
    while not ring.is_done(number):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_chunk_is_enqueued_within_the_call_that_submits_it(
    connect_prefill: Connect, tmp_path: Path, memory: HostMemory
) -> None:
    with (
        _Orders(tmp_path, [3, 3, 8, 8]) as agent,
        connect_prefill(tmp_path, memory, layout(), placement="worker") as client,
    ):
        assert agent.ring.num_enqueued == 0
        for num_entries in (3, 3, 8):
            client.submit(A, {})
            assert agent.ring.num_enqueued == num_entries
        submits = [each for each in agent.requests if isinstance(each, Submit)]
        assert [each.ready for each in submits] == [1, 2, 3], "every submit marks the timeline"
        assert agent.ring.timeline == 3
        assert client.mark() == 4
        client.submit(A, {}, ready=2)
        assert agent.requests[-1] == submit_request(A, {}, None, False, b"", 60.0, ready=2)
        _skip(agent.ring, 0, 8)
        _until_done(agent.ring, 7)
        assert not agent.ring.has_ended


def test_orders_move_rows_between_the_pool_and_the_slots(
    connect_decode: Connect, tmp_path: Path, memory: HostMemory
) -> None:
    with (
        _Orders(tmp_path, [1], is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout(), placement="worker") as client,
    ):
        client.open(ticket(A), {})
        agent.slots.array[:64] = np.arange(64)
        span = Span(
            row_bytes=32,
            num_rows=2,
            word_bytes=16,
            src_memory=MemoryIndex.SLOTS,
            src_first_byte=0,
            src_table=-1,
            dst_memory=MemoryIndex.POOL,
            dst_first_byte=128,
            dst_table=0,
        )
        agent.ring.fill_lane(2, [span], np.array([4096, 0], dtype=np.int64))
        agent.ring.order(0, OrderCode.RUN, 2)
        _until_done(agent.ring, 0)
    assert memory.array[4096 + 128 : 4096 + 160].tolist() == list(range(32))
    assert memory.array[128:160].tolist() == list(range(32, 64))
    assert np.count_nonzero(memory.array) == 63


def test_a_worker_that_waits_is_woken_to_enqueue(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    """Entries that are wanted later, or for which there was no room, are enqueued while the worker waits."""
    wanted = 2 * MAX_UNFINISHED + 5

    def serve(agent: _Orders) -> None:
        agent.want(wanted)
        for number in range(wanted):
            deadline_s = time.monotonic() + 10
            while agent.ring.num_enqueued <= number:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            assert agent.ring.num_enqueued <= number + MAX_UNFINISHED + 1
            agent.ring.order(number, OrderCode.SKIP)
        _until_done(agent.ring, wanted - 1)
        agent.say(landed(A))

    with (
        _Orders(tmp_path, [1], is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout(), placement="worker") as client,
    ):
        client.open(ticket(A), {})
        serving = threading.Thread(target=serve, args=(agent,))
        serving.start()
        assert client.wait(A, 20) == landed(A)
        serving.join()


def test_looking_for_events_enqueues(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with (
        _Orders(tmp_path, [0], is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout(), placement="worker") as client,
    ):
        client.open(ticket(A), {})
        agent.want(4)
        deadline_s = time.monotonic() + 5
        while agent.ring.num_enqueued < 4:
            assert client.next_event(0) is None
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        _skip(agent.ring, 0, 4)


def test_an_agent_that_dies_leaves_no_stream_waiting(
    connect_decode: Connect, tmp_path: Path, memory: HostMemory
) -> None:
    with (
        _Orders(tmp_path, [6, 9], is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout(), placement="worker") as client,
    ):
        client.open(ticket(A), {})
        client.open(ticket(B), {})
        ring = client._link.stream._ring if hasattr(client, "_link") else client._client._link.stream._ring
        agent.die()
        failed = client.wait(A, 5)
        assert (failed.event, failed.reason) == (EventKind.FAILED, Reason.AGENT_LOST)
        assert all(ring.is_done(number) for number in range(9)), "pages are quiet once the event is there"
        assert ring.has_ended
        assert client.next_event(5).transfer == B
        with pytest.raises(AgentLostError):
            client.open(ticket(A), {})


def test_pages_of_a_stream_that_does_not_come_to_rest_are_said_not_to_be_quiet(
    connect_decode: Connect, tmp_path: Path, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("kvxfer.control.client_link.DRAIN_S", 0.05)
    monkeypatch.setattr("kvxfer.streams.host_stream.HostRowStream._execute", lambda *_: go_on.wait(5))
    with (
        _Orders(tmp_path, [1], is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout(), placement="worker") as client,
    ):
        client.open(ticket(A), {})
        agent.die()
        failed = client.wait(A, 5)
        assert failed.reason is Reason.AGENT_LOST
        assert "pages may not be quiet" in failed.detail
        go_on.set()


def test_a_worker_that_leaves_ends_its_stream_first(
    connect_prefill: Connect, tmp_path: Path, memory: HostMemory
) -> None:
    with _Orders(tmp_path, [5]) as agent:
        with connect_prefill(tmp_path, memory, layout(), placement="worker") as client:
            client.submit(A, {})
        assert agent.ring.has_ended
        assert all(agent.ring.is_done(number) for number in range(5))
        with pytest.raises(AgentLostError):
            client.mark()


def test_moved_slots_are_mapped_and_acknowledged(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with (
        _Orders(tmp_path, [1], is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout(), placement="worker") as client,
    ):
        client.open(ticket(A), {})
        with agent.move_slots(3) as moved:
            moved.array[:] = 8
            deadline_s = time.monotonic() + 5
            while SlotsMapped(move=3) not in agent.requests:
                assert client.next_event(0.01) is None
                assert time.monotonic() < deadline_s
        span = Span(64, 1, 16, MemoryIndex.SLOTS, SLOTS_BYTES - 64, -1, MemoryIndex.POOL, POOL_BYTES - 64, -1)
        agent.ring.fill_lane(0, [span], np.empty(0, dtype=np.int64))
        agent.ring.order(0, OrderCode.RUN, 0)
        _until_done(agent.ring, 0)
        assert np.all(memory.array[-64:] == 8)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("kvxfer.memory._map_over", OSError(12, "Cannot allocate memory")),
        ("kvxfer.streams.host_stream.HostRowStream.set_memory", RegistrationError("the GPU refuses")),
    ],
    ids=["mapped", "registered"],
)
def test_moved_slots_that_cannot_be_used_end_everything(
    connect_decode: Connect,
    tmp_path: Path,
    memory: HostMemory,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: Exception,
) -> None:
    with (
        _Orders(tmp_path, [2], is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout(), placement="worker") as client,
    ):
        client.open(ticket(A), {})

        def refuse(*_: object) -> None:
            raise error

        monkeypatch.setattr(place, refuse)
        agent._do(lambda: agent._handoffs.move_slots(agent._pools[-1].pool, 1, agent.slots))
        failed = client.wait(A, 5)
        assert failed.reason is Reason.AGENT_LOST
        assert "cannot be used here" in failed.detail


def test_a_worker_without_a_ring_has_nothing_to_enqueue(
    connect_prefill: Connect, tmp_path: Path, memory: HostMemory
) -> None:
    with (
        FakeAgent(tmp_path, accept_all) as agent,
        connect_prefill(tmp_path, memory, layout()) as client,
    ):
        made = client.ticket()
        assert client.mark() == 0
        client.submit(made, {})
        agent.want(5)
        agent.say(TransferEvent(transfer=made.transfer, event=EventKind.SENT))
        assert client.wait(made, 5).event is EventKind.SENT
        assert isinstance(agent.requests[-1], Submit)
        assert agent.requests[-1].ready == 0


def test_a_placement_that_there_is_not(connect_prefill: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with pytest.raises(ContractError, match="placement: got 'gpu', expected 'agent' or 'worker'"):
        connect_prefill(tmp_path, memory, layout(), placement="gpu")


def test_a_host_pool_has_no_streams_to_mark(connect_prefill: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with (
        FakeAgent(tmp_path, accept_all),
        connect_prefill(tmp_path, memory, layout(), placement="worker") as client,
        pytest.raises(ContractError, match="a host pool has no streams"),
    ):
        client.mark(object())
