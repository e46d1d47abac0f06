"""What both agents share, under an agent that does nothing: workers come and go, the pool outlives its last use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.control.channel import REMOTE, WorkerConnection
from kvxfer.control.client import DecodeClient
from kvxfer.control.codec import decode, encode
from kvxfer.control.ids import new_id
from kvxfer.control.messages import AbortTransfer, Message, Ok, Ping, Refused, TransferEvent, WorkerReply
from kvxfer.errors import ConfigError, LayoutError, RefusedError, RegistrationError
from kvxfer.memory import HostMemory
from kvxfer.sidecar import MAX_MESSAGES_PER_TURN, TICK_S
from kvxfer.transfer import EventKind, Reason
from tests.idle_agent import WAIT_S, IdleAgent, until
from tests.prefill.driver import pool_layout

LAYOUT = pool_layout()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[IdleAgent]:
    found = IdleAgent(tmp_path / "agent")
    found.start()
    yield found
    found.end()


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with HostMemory.create(LAYOUT.groups[0].extent_bytes, "pool") as found:
        yield found


def _connect(agent: IdleAgent, memory: HostMemory) -> DecodeClient:
    return DecodeClient.connect(agent.sidecar.desk.channel._claim.path.parent, memory, LAYOUT, timeout_s=WAIT_S)


def test_a_worker_attaches_asks_and_goes(agent: IdleAgent, memory: HostMemory) -> None:
    with _connect(agent, memory) as client:
        assert client.incarnation == agent.sidecar.incarnation
        pool = agent.sidecar.pool
        assert pool is not None
        mapped = pool.memory
        assert mapped is not None
        memory.array[7] = 99
        assert mapped.array[7] == 99
    until(lambda: "lost" in agent.told)
    until(lambda: mapped.fd < 0)
    assert agent.heard() == ["attached", "lost"]


def test_a_lost_pool_stays_mapped_until_it_is_quiet_and_the_next_worker_waits(
    agent: IdleAgent, memory: HostMemory
) -> None:
    """R8: the pool is never adopted by the next worker, whose own comes under another id."""
    with _connect(agent, memory):
        first = agent.sidecar.pool
        agent.is_quiet = False
    until(lambda: "lost" in agent.told)
    clients: list[DecodeClient] = []
    joining = threading.Thread(target=lambda: clients.append(_connect(agent, memory)))
    joining.start()
    joining.join(0.3)
    assert joining.is_alive()
    assert first is not None
    assert first.memory is not None
    assert first.memory.fd >= 0
    agent.is_quiet = True
    joining.join(WAIT_S)
    with clients[0]:
        assert first.memory.fd < 0
        assert agent.sidecar.pool is not None
        assert agent.sidecar.pool.pool != first.pool
        assert agent.heard() == ["attached", "lost", "attached"]


def test_a_second_worker_is_refused_until_the_first_has_gone(agent: IdleAgent, memory: HostMemory) -> None:
    with HostMemory.create(LAYOUT.groups[0].extent_bytes, "other") as other:
        with _connect(agent, memory):
            for _ in range(3):
                with pytest.raises(RefusedError, match="one agent serves one worker"):
                    _connect(agent, other)
            assert agent.heard() == ["attached"]
        _connect(agent, other).close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RefusedError("no", Reason.STALE, "pages"), Refused(reason=Reason.STALE, detail="no", field="pages")),
        (LayoutError("x" * 5000), Refused(detail="x" * 2000)),
    ],
)
def test_a_request_that_fails_is_answered_and_the_agent_lives(
    agent: IdleAgent, memory: HostMemory, error: Exception, expected: Refused
) -> None:
    def refuse(_: Message) -> WorkerReply:
        raise error

    with _connect(agent, memory) as client:
        channel = client._link.channel
        agent.answer = refuse
        for request_id in (71, 72):
            channel.send(REMOTE, encode(AbortTransfer(transfer=new_id()), request_id))
            assert _answer(channel) == (expected, request_id)
        agent.answer = lambda _: Ok()
        channel.send(REMOTE, encode(AbortTransfer(transfer=new_id()), 73))
        assert _answer(channel) == (Ok(), 73)


def _answer(channel: WorkerConnection) -> tuple[Message, int]:
    until(channel.readable)
    received = channel.receive()
    assert received is not None
    return decode(received[1])


def test_whoever_has_not_handed_over_a_pool_gets_nothing(agent: IdleAgent, memory: HostMemory) -> None:
    """Neither requests nor events; garbage is dropped, and the attached worker is served as before."""
    with _connect(agent, memory) as client, WorkerConnection(agent.sidecar.desk.channel._claim.path.parent) as stranger:
        stranger.send(REMOTE, b"\xff" * 100)
        stranger.send(REMOTE, encode(Ping(incarnation=new_id()), 5))
        answer, request_id = _answer(stranger)
        assert isinstance(answer, Refused)
        assert request_id == 5
        event = TransferEvent(transfer=new_id(), event=EventKind.LANDED)
        agent.do(lambda: agent.sidecar.notify(event))
        client.abort(new_id())
        time.sleep(2 * TICK_S)
        assert not stranger.readable()


class _Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("late_s", "is_judged"), [(0.5 * TICK_S, False), (1.5 * TICK_S, True)])
def test_what_has_arrived_is_served_before_the_clock_is_judged(
    tmp_path: Path, memory: HostMemory, monkeypatch: pytest.MonkeyPatch, late_s: float, is_judged: bool
) -> None:
    """R4: when a tick is due, more messages are there than one turn takes. They come first, if they end in time."""
    clock = _Clock()
    monkeypatch.setattr("kvxfer.sidecar.time", clock)
    agent = IdleAgent(tmp_path / "agent")
    agent.start()
    with _connect(agent, memory) as client:
        num_messages = 2 * MAX_MESSAGES_PER_TURN + 50
        asleep, awake = threading.Event(), threading.Event()

        def hold(_: Message) -> WorkerReply:
            asleep.set()
            assert awake.wait(WAIT_S)
            return Ok()

        agent.answer = hold
        client._link.channel.send(REMOTE, encode(AbortTransfer(transfer=new_id()), 1))
        assert asleep.wait(WAIT_S)
        del agent.told[:]
        for idx in range(num_messages):
            assert client._link.channel.send(REMOTE, encode(AbortTransfer(transfer=new_id()), 2 + idx))
        clock.now_s += TICK_S + late_s
        time.sleep(0.1)  # until all have arrived
        awake.set()
        until(lambda: len(agent.heard()) == num_messages)
        agent.end()
    assert ("tick" in agent.told[:num_messages]) is is_judged


@pytest.mark.parametrize("lets_go", [True, False])
def test_the_slots_move_and_late_writes_to_the_old_ones_hit_nothing(
    tmp_path: Path, lets_go: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine does not let go of the old memory: half a move would mix up old slots and new ones."""
    agent = IdleAgent(tmp_path / "agent")
    sidecar = agent.sidecar

    def refuse(*_: object) -> None:
        raise RegistrationError("the engine does not let go")

    if not lets_go:
        monkeypatch.setattr(sidecar.transport, "deregister", refuse)
    old_address, old_region = sidecar.slots.address(0), sidecar.region
    sidecar.slots.view(0)[:] = 1
    sidecar.renew_slots()
    assert sidecar.region.region_id != old_region.region_id
    sidecar.slots.view(0)[:] = 2
    ctypes.memset(old_address, 3, 8192)  # a write that lands now finds memory, but nobody's
    assert set(sidecar.slots.view(0).tolist()) == {2}
    agent.end()


def test_an_agent_gives_everything_back(tmp_path: Path, memory: HostMemory) -> None:
    """Also one that could not be built, and one whose directory another agent has."""
    num_fds, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(2):
        agent = IdleAgent(tmp_path / "agent")
        with pytest.raises(ConfigError, match="in use"):
            IdleAgent(tmp_path / "agent")
        agent.start()
        _connect(agent, memory).close()
        agent.end()
        agent.sidecar.close()
        assert list((tmp_path / "agent").iterdir()) == []
    with pytest.raises(ConfigError, match="transport"):
        IdleAgent(tmp_path / "agent", "pigeon")
    assert list((tmp_path / "agent").iterdir()) == []
    until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == (num_fds, num_threads))


def test_a_signal_after_the_end_does_nothing(tmp_path: Path) -> None:
    """It may come while all is being closed: then it must neither end that half way nor touch a descriptor that is
    somebody else's by now."""
    agent = IdleAgent(tmp_path / "agent")
    agent.start()
    stop_fd = agent.sidecar._stop_fd
    agent.end()
    agent.sidecar.stop()
    with contextlib.ExitStack() as stack:
        mine = os.eventfd(0, os.EFD_NONBLOCK)
        stack.callback(os.close, mine)
        if mine != stop_fd:
            os.dup2(mine, stop_fd)
            stack.callback(os.close, stop_fd)
        agent.sidecar.stop()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(mine)
