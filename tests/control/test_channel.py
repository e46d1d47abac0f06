"""Channels between processes: who may bind, what is dropped, and that nothing ever blocks."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvxfer.control.channel import REMOTE, Selector, WorkerConnection, WorkerListener
from kvxfer.control.peer_channel import MAX_PEER_FRAME_BYTES, PeerListener
from kvxfer.errors import ConfigError, ProtocolError
from tests.control.waiting import (
    CONNECTOR,
    INCARNATION,
    LISTENER,
    connect,
    next_frame,
    num_descriptors,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def peers() -> Iterator[PeerListener]:
    with PeerListener("127.0.0.1", 0, LISTENER) as listener:
        yield listener


def _introduce(stranger: zmq.Socket[bytes], peers: PeerListener) -> None:
    """Connect a bare socket that can send what a `Connection` would not."""
    stranger.linger = 0
    stranger.routing_id = b"ee" * 16
    stranger.curve_publickey = CONNECTOR.keys.public.encode()
    stranger.curve_secretkey = CONNECTOR.keys.secret.encode()
    stranger.curve_serverkey = LISTENER.keys.public.encode()
    stranger.connect(peers.endpoint)


def test_few_files_know_zmq() -> None:
    files = [path for room in ("kvxfer", "transports", "kernels") for path in (ROOT / room).rglob("*.py")]
    knowing = {
        path.resolve() for path in files if re.search(r"^\s*(import|from) zmq\b", path.read_text(), re.MULTILINE)
    }
    assert knowing == {ROOT / f"kvxfer/control/{name}.py" for name in ("channel", "doorkeeper", "peer_channel")}


def test_worker_and_agent_talk_both_ways(tmp_path: Path) -> None:
    with WorkerListener(tmp_path) as listener, WorkerConnection(tmp_path) as worker:
        assert worker.send(REMOTE, b"question")
        sender, frame = next_frame(listener)
        assert frame == b"question"
        assert listener.send(sender, b"answer")
        assert next_frame(worker) == (REMOTE, b"answer")
        assert listener.receive() is None


def test_permissions_of_the_socket_and_a_new_directory(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with WorkerListener(tmp_path / "run"):
            assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o750
            assert stat.S_IMODE((tmp_path / "run/control.sock").stat().st_mode) == 0o660
            assert os.umask(0) == 0
    finally:
        os.umask(umask)


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o770, 0o1777])
def test_an_open_directory_is_refused_and_left_as_it_is(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:#o}, expected 0750"):
        WorkerListener(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    assert list(tmp_path.iterdir()) == []


def test_a_second_agent_is_refused_and_the_first_lives(tmp_path: Path) -> None:
    with WorkerListener(tmp_path) as first, WorkerConnection(tmp_path) as worker:
        with pytest.raises(ConfigError, match="in use by another agent"):
            WorkerListener(tmp_path)
        assert worker.send(REMOTE, b"still there?")
        assert next_frame(first)[1] == b"still there?"
    with WorkerListener(tmp_path):
        pass  # Its own end has freed the directory.
    assert list(tmp_path.iterdir()) == []


def test_a_dead_agents_socket_is_replaced(tmp_path: Path) -> None:
    program = (
        "import os, sys; from kvxfer.control.channel import WorkerListener; "
        "listener = WorkerListener(sys.argv[1]); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=30)
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "control.sock"}
    with WorkerListener(tmp_path) as listener, WorkerConnection(tmp_path) as worker:
        assert worker.send(REMOTE, b"new life")
        assert next_frame(listener)[1] == b"new life"


def test_a_lock_that_its_holder_removed_in_between_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[int] = []

    def flock_late(fd: int, operation: int) -> None:
        if not removed:
            (tmp_path / "lock").unlink()
            removed.append(fd)
        flock(fd, operation)

    monkeypatch.setattr("kvxfer.control.socket_dir.fcntl.flock", flock_late)
    with WorkerListener(tmp_path), pytest.raises(ConfigError, match="in use by another agent"):
        WorkerListener(tmp_path)
    assert removed


def test_a_worker_does_not_drift_to_the_next_agent(tmp_path: Path) -> None:
    first = WorkerListener(tmp_path)
    with WorkerConnection(tmp_path) as worker:
        assert worker.send(REMOTE, b"hello")
        next_frame(first)
        first.close()
        with WorkerListener(tmp_path) as second:
            for _ in range(10):  # ZMQ would be back within 0.1 s
                worker.send(REMOTE, b"for the first agent")
                assert not Selector([second]).wait(0.05)


def test_a_plain_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "control.sock").write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        WorkerListener(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["control.sock"]
    assert (tmp_path / "control.sock").read_text() == "mine"


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107"):
        WorkerListener(tmp_path / ("x" * 100))


def test_a_message_for_nobody_is_reported(peers: PeerListener) -> None:
    assert not peers.send(b"nobody", b"x")


def test_a_peer_that_never_reads_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.control.channel._QUEUE_MESSAGES", 16)
    with PeerListener("127.0.0.1", 0, LISTENER) as listener:
        deaf = connect(listener.endpoint)
        reader = connect(listener.endpoint, "cd" * 16)
        deaf.send(REMOTE, b"hello")
        reader.send(REMOTE, b"hello")
        next_frame(listener)
        next_frame(listener)
        frame = bytes(1 << 20)
        start_s = time.monotonic()
        num_sent = 0
        while listener.send(INCARNATION.encode(), frame):
            num_sent += 1
            assert num_sent < 200, "the queue has no bound"
        assert time.monotonic() - start_s < 3
        assert listener.send(b"cd" * 16, b"you are served")
        assert next_frame(reader) == (REMOTE, b"you are served")
        deaf.close()
        reader.close()


def test_a_connection_to_nobody_fills_up_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.control.channel._QUEUE_MESSAGES", 16)
    with connect("tcp://127.0.0.1:1") as connection:
        assert [connection.send(REMOTE, b"x") for _ in range(17)] == [True] * 16 + [False]
        assert connection.receive() is None


def test_a_frame_that_is_too_long_is_refused_by_the_sender(peers: PeerListener) -> None:
    with connect(peers.endpoint) as connection, pytest.raises(ProtocolError, match="at most"):
        connection.send(REMOTE, bytes(MAX_PEER_FRAME_BYTES + 1))


def test_odd_messages_are_dropped_and_counted(peers: PeerListener) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        _introduce(stranger, peers)
        stranger.send_multipart([b"", b"two"])
        stranger.send_multipart([b"x"] * 20_000)
        stranger.send(b"one frame")
        assert next_frame(peers)[1] == b"one frame"
        assert peers.dropped == 2


def test_a_flood_of_odd_messages_hands_the_loop_back(peers: PeerListener) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        _introduce(stranger, peers)
        for _ in range(200):
            stranger.send_multipart([b"a", b"b"])
        stranger.send(b"good")
        while not peers.dropped:
            Selector([peers]).wait(0.2)
            assert peers.receive() is None or peers.dropped
        assert peers.dropped <= 64
        assert next_frame(peers)[1] == b"good"
        assert peers.dropped == 200


def test_a_too_long_frame_from_outside_ends_its_sender_only(peers: PeerListener) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        _introduce(stranger, peers)
        stranger.send(bytes(MAX_PEER_FRAME_BYTES + 1))
        with connect(peers.endpoint) as connection:
            connection.send(REMOTE, b"fine")
            assert next_frame(peers) == (INCARNATION.encode(), b"fine")
        assert peers.receive() is None


def test_a_peer_comes_back_under_its_name(peers: PeerListener) -> None:
    """Also while the listener has not yet seen the end of the earlier connection."""
    first = connect(peers.endpoint)
    first.send(REMOTE, b"first")
    assert next_frame(peers)[1] == b"first"
    with connect(peers.endpoint) as second:
        second.send(REMOTE, b"second")
        assert next_frame(peers) == (INCARNATION.encode(), b"second")
        assert peers.send(INCARNATION.encode(), b"answer")
        assert next_frame(second)[1] == b"answer"
        first.close()


def test_selector_waits_for_channels_and_descriptors(peers: PeerListener) -> None:
    event = os.eventfd(0, os.EFD_CLOEXEC)
    left, right = socket.socketpair()
    with left, right, connect(peers.endpoint) as connection:
        connection.send(REMOTE, b"let me in")
        assert next_frame(peers)[1] == b"let me in"
        selector = Selector([peers, event, left])
        while selector.wait(0.1):  # what comes with a handshake
            assert peers.receive() is None
        start_s = time.monotonic()
        assert selector.wait(0.05) == []
        assert 0.045 < time.monotonic() - start_s < 2
        os.eventfd_write(event, 1)
        assert selector.wait(5) == [event]
        right.close()
        assert set(selector.wait(5)) == {event, left}
        selector.remove(event)
        selector.remove(left)
        connection.send(REMOTE, b"hello")
        assert selector.wait(5) == [peers]
        assert selector.wait(5) == [peers], "what was not read is still there"
        assert next_frame(peers)[1] == b"hello"
        assert selector.wait(0) == []
    os.close(event)


def test_nothing_is_left_after_the_last_channel(tmp_path: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = num_descriptors(), threads()
    for _ in range(3):
        with WorkerListener(tmp_path), PeerListener("127.0.0.1", 0, LISTENER) as peers:
            connect(peers.endpoint).close()
            with pytest.raises(ConfigError):
                WorkerListener(tmp_path)
    assert (num_descriptors(), threads()) == before


def test_what_is_readable_comes_in_the_order_of_adding() -> None:
    """Whatever the numbers of the descriptors are."""
    events = [os.eventfd(1, os.EFD_CLOEXEC) for _ in range(40)]
    shuffled = [events[idx * 7 % 40] for idx in range(40)]
    try:
        assert Selector(shuffled).wait(0.0) == shuffled
    finally:
        for event in events:
            os.close(event)
