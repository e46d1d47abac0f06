"""Hand-off of a pool: what is refused, that the reason arrives, and that nothing leaks either way."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvxfer.control.device_handoff import DeviceMapping
from kvxfer.control.handoff import HandoffConnection, hand_over
from kvxfer.control.handoff_listener import (
    HANDOFF_TIMEOUT_S,
    MAX_CONNECTIONS,
    HandoffEvent,
    HandoffListener,
    LostPool,
    ReceivedPool,
    RefusedHandoff,
)
from kvxfer.control.handoff_messages import PoolOffer, PoolRefused, pack
from kvxfer.control.shared_memory import SharedMemory
from kvxfer.errors import AgentLostError, ConfigError, ControlTimeoutError, HandoffError, LayoutError
from kvxfer.memory import HostMemory
from kvxfer.streams.device import PoolHandle
from tests.control.pools import OFFER, POOL_BYTES, accepted, client_of, layout, memfd, next_events, select_ready
from tests.control.waiting import no_more_descriptors, num_descriptors


def test_a_pool_is_shared_and_each_side_sees_the_other_go(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    connection, received = accepted(listener, tmp_path, memory)
    assert received.pool == connection.pool
    assert received.layout == layout()
    assert received.pid == os.getpid()
    assert received.memory is not None
    memory.array[5] = 7
    assert received.memory.array[5] == 7
    assert not connection.lost()
    assert listener.poll(time.monotonic()) == []
    connection.close()
    assert next_events(listener) == [LostPool(received.pool)]
    received.close()

    connection, received = accepted(listener, tmp_path, memory)
    listener.release(received.pool)
    assert connection.lost()
    connection.close()
    received.close()
    assert listener.poll(time.monotonic()) == [], "the agent itself hung up: that is no loss"


def test_closing_the_listener_ends_every_hand_over(tmp_path: Path, memory: HostMemory) -> None:
    listener = HandoffListener(tmp_path)
    connection, received = accepted(listener, tmp_path, memory)
    listener.close()
    assert connection.lost()
    connection.close()
    assert received.memory is not None
    assert received.memory.array[0] == 0, "the mapping is the receiver's"
    received.close()


def test_permissions_and_the_second_agent(listener: HandoffListener, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "handoff.sock").stat().st_mode) == 0o660
    with pytest.raises(ConfigError, match="in use by another agent"):
        HandoffListener(tmp_path)
    assert listener.poll(time.monotonic()) == []


def test_a_worker_that_says_nothing_blocks_nobody_and_expires(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    with client_of(tmp_path) as silent, client_of(tmp_path) as slow:
        socket.send_fds(slow, [OFFER[:1]], [memory.fd])
        connection, received = accepted(listener, tmp_path, memory)
        for byte in OFFER[1:20]:
            slow.send(bytes([byte]))
            assert listener.poll(time.monotonic()) == []
        assert listener.poll(time.monotonic() + HANDOFF_TIMEOUT_S - 1) == []
        late_s = time.monotonic() + HANDOFF_TIMEOUT_S
        refused = RefusedHandoff(f"no complete offer within {HANDOFF_TIMEOUT_S} s")
        assert listener.poll(late_s) == [refused, refused]
        assert b"no complete offer" in silent.recv(1000)
        assert not connection.lost(), "a hand-over that is complete has no time-out"
        connection.close()
        received.close()


def test_a_slow_worker_is_served_in_the_end(listener: HandoffListener, tmp_path: Path, memory: HostMemory) -> None:
    with client_of(tmp_path) as client:
        events: Sequence[HandoffEvent] = []
        for first in range(0, len(OFFER), 7):
            assert events == []
            socket.send_fds(client, [OFFER[first : first + 7]], [memory.fd] if first == 0 else [])
            while not events and select_ready(listener):
                events = listener.poll(time.monotonic())
        (received,) = events
        assert isinstance(received, ReceivedPool)
        received.close()


def test_a_crowd_is_turned_away_and_the_listener_lives(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    crowd = []
    refusals = 0
    for _ in range(MAX_CONNECTIONS + 3):
        crowd.append(client_of(tmp_path))
        refusals += len(listener.poll(time.monotonic()))
    assert refusals == 3
    for client in crowd:
        client.close()
    while select_ready(listener):
        listener.poll(time.monotonic())
    connection, received = accepted(listener, tmp_path, memory)
    connection.close()
    received.close()


def test_running_out_of_descriptors_pauses_the_listener(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: socket.socket) -> tuple[socket.socket, str]:
        raise OSError(24, "Too many open files")

    now_s = time.monotonic()
    with client_of(tmp_path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", refuse)
            assert listener.poll(now_s) == [RefusedHandoff("cannot accept a connection: Too many open files")]
            assert not select_ready(listener), "the loop would spin"
        assert listener.poll(now_s + 2) == []
        socket.send_fds(client, [OFFER], [memory.fd])
        (received,) = next_events(listener)
        assert isinstance(received, ReceivedPool)
        received.close()


def test_the_worker_hears_why(listener: HandoffListener, tmp_path: Path) -> None:
    errors: list[HandoffError] = []

    def worker(memory: HostMemory) -> None:
        with pytest.raises(HandoffError, match="expected F_SEAL_GROW") as caught:
            hand_over(tmp_path, memory, layout(), 5.0)
        errors.append(caught.value)

    unsealed = HostMemory(memfd(POOL_BYTES, 0), POOL_BYTES)
    thread = threading.Thread(target=worker, args=(unsealed,))
    thread.start()
    assert isinstance(next_events(listener)[0], RefusedHandoff)
    thread.join()
    assert len(errors) == 1
    unsealed.close()


def test_the_worker_checks_its_layout_before_it_connects(tmp_path: Path, memory: HostMemory) -> None:
    with pytest.raises(LayoutError, match="ends at byte 8448"):
        hand_over(tmp_path, memory, layout(17), 5.0)


def test_a_worker_without_an_agent(tmp_path: Path, memory: HostMemory) -> None:
    before = num_descriptors()
    with pytest.raises(AgentLostError, match="no agent listens"):
        hand_over(tmp_path, memory, layout(), 0.1)
    assert num_descriptors() == before


def test_an_agent_that_does_not_answer(listener: HandoffListener, tmp_path: Path, memory: HostMemory) -> None:
    before = num_descriptors()
    with pytest.raises(ControlTimeoutError, match=r"no answer in 0\.1 s"):
        hand_over(tmp_path, memory, layout(), 0.1)
    assert num_descriptors() == before
    listener.close()  # with the connection still in its backlog


def test_a_worker_may_come_first(tmp_path: Path, memory: HostMemory) -> None:
    results: list[HandoffConnection] = []
    worker = threading.Thread(target=lambda: results.append(hand_over(tmp_path, memory, layout(), 5.0)))
    worker.start()
    time.sleep(0.1)
    listener = HandoffListener(tmp_path)
    (received,) = next_events(listener)
    worker.join()
    assert isinstance(received, ReceivedPool)
    assert results[0].pool == received.pool
    results[0].close()
    received.close()
    listener.close()


def test_a_forked_child_does_not_hide_the_workers_death(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    connection, received = accepted(listener, tmp_path, memory)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Newer Pythons warn where threads run.
        child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        connection.close()
        assert next_events(listener) == [LostPool(received.pool)]
    finally:
        os.close(writer)
        os.close(reader)
        assert os.waitpid(child, 0) == (child, 0)
        received.close()


def test_a_refusal_before_the_offer_is_heard(
    tmp_path: Path, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that hangs up before it has read anything has said why."""
    send_fds = socket.send_fds
    hung_up = threading.Event()

    def send_late(connection: socket.socket, buffers: Sequence[bytes], fds: Sequence[int]) -> int:
        assert hung_up.wait(5)
        return send_fds(connection, buffers, fds)

    def refuse() -> None:
        with server.accept()[0] as connection:
            connection.sendall(pack(PoolRefused(detail="not you")))
        hung_up.set()

    monkeypatch.setattr("kvxfer.control.handoff.socket.send_fds", send_late)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "handoff.sock"))
        server.listen()
        agent = threading.Thread(target=refuse)
        agent.start()
        with pytest.raises(HandoffError, match="not you"):
            hand_over(tmp_path, memory, layout(), 5.0)
        agent.join()


def test_a_pool_of_a_gpu_is_refused_where_no_descriptor_is_left_for_it(
    memory: HostMemory,
) -> None:
    """It needs two: one to be mapped, one for peers."""
    handle = PoolHandle("0" * 32, memory.num_bytes, 0, 2 << 20, 1)
    offer = PoolOffer(
        num_bytes=memory.num_bytes, layout=layout(), pool=SharedMemory(num_bytes=memory.num_bytes, gpu=handle)
    )
    fd = os.dup(memory.fd)
    with no_more_descriptors(), pytest.raises(HandoffError, match="cannot be mapped: Too many open files"):
        DeviceMapping(offer, [fd], lambda _work: pytest.fail("nothing is mapped"), lambda: None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
