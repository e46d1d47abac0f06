"""Strangers at a prefill agent's port: they get nowhere, they are counted, and the next peer is served."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvxfer.control.channel import REMOTE, Selector, WorkerListener
from kvxfer.control.codec import MAX_TICKET_CHARS, decode_ticket, encode_ticket
from kvxfer.control.messages import MAX_SOURCES, Source, Ticket
from kvxfer.control.peer_channel import Connection, Credentials, PeerListener, new_keys
from kvxfer.errors import ProtocolError
from tests.control.waiting import CONNECTOR, INCARNATION, LISTENER, connect, next_frame, num_descriptors, port_of

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
"""The head of ZMTP 3.1's greeting: signature, version."""


@pytest.fixture
def peers() -> Iterator[PeerListener]:
    """A listener that still serves after the test, and leaves nothing behind."""
    before = num_descriptors()
    with PeerListener("127.0.0.1", 0, LISTENER) as listener:
        yield listener
        with connect(listener.endpoint) as connection:
            connection.send(REMOTE, b"hello")
            assert next_frame(listener) == (INCARNATION.encode(), b"hello")
    assert num_descriptors() == before


def _until(listener: PeerListener, done: Callable[[], bool], timeout_s: float = 5) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, listener.counts
        Selector([listener]).wait(0.1)
        assert listener.receive() is None


def _say(listener: PeerListener, data: bytes) -> bytes:
    """Send `data`, hang up; what came back before that."""
    with socket.create_connection(("127.0.0.1", port_of(listener)), timeout=5) as client:
        heard = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            client.sendall(data)
            client.settimeout(0.05)
            while part := client.recv(4096):
                heard += part
    return heard


def test_http_is_counted_as_a_stranger(peers: PeerListener) -> None:
    for _ in range(3):
        heard = _say(peers, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        assert len(heard) <= 64  # our greeting at most, no answer
    _until(peers, lambda: peers.counts.num_strangers == 3)
    assert (peers.counts.num_accepted, peers.counts.num_admitted, peers.counts.num_failed) == (3, 0, 0)


def test_silence_and_half_a_greeting_are_counted(peers: PeerListener) -> None:
    _say(peers, b"")
    _say(peers, GREETING[:6])
    _until(peers, lambda: peers.counts.num_failed + peers.counts.num_strangers == 2)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.PUSH, zmq.ROUTER])
def test_plain_zmq_gets_nothing_through(peers: PeerListener, kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as stranger:
        stranger.linger = 0
        if kind == zmq.DEALER:
            stranger.routing_id = INCARNATION.encode()
        stranger.connect(peers.endpoint)
        with contextlib.suppress(zmq.Again):  # a ROUTER does not even know whom to send to
            stranger.send_multipart([b"x", b"hello"], zmq.DONTWAIT)
        _until(peers, lambda: peers.counts.num_failed == 1)
    assert peers.counts.num_admitted == 0
    assert peers.dropped == 0


def test_the_oldest_protocol_of_zmq_is_no_way_round(peers: PeerListener) -> None:
    """Version 1 has no greeting and no security: a length, a name, a length, a message."""
    name, message = INCARNATION.encode(), b"hello"
    _say(peers, bytes([len(name) + 1, 0]) + name + bytes([len(message) + 1, 0]) + message)
    _until(peers, lambda: peers.counts.num_strangers == 1)
    assert peers.counts.num_admitted == 0


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE"])
def test_a_handshake_by_hand_without_keys(peers: PeerListener, mechanism: bytes) -> None:
    greeting = GREETING + mechanism.ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    _say(peers, greeting + b"\x04" + bytes([len(ready)]) + ready + b"\x00\x05hello")
    _until(peers, lambda: peers.counts.num_failed == 1)
    assert peers.counts.num_admitted == 0


def test_a_name_that_is_no_incarnation_is_dropped(peers: PeerListener) -> None:
    for name in ("x", INCARNATION.upper(), INCARNATION + "0"):
        with Connection(peers.endpoint, name, CONNECTOR, LISTENER.keys.public) as connection:
            connection.send(REMOTE, b"hello")
            _until(peers, lambda expected=peers.dropped + 1: peers.dropped == expected)  # type: ignore[misc]


def test_many_connections_at_once_do_not_keep_others_out(peers: PeerListener) -> None:
    """Idle ones, which ZMQ ends after its handshake time, are not waited for."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(peers)), timeout=5))
        with connect(peers.endpoint, "cd" * 16) as connection:
            began_s = time.monotonic()
            connection.send(REMOTE, b"hello")
            assert next_frame(peers)[1] == b"hello"
            assert time.monotonic() - began_s < 2
    _until(peers, lambda: peers.counts.num_failed + peers.counts.num_strangers == 100)


def test_strangers_cost_no_memory(peers: PeerListener) -> None:
    """Descriptors and memory are back when they are gone."""
    random_bytes = itertools.cycle(os.urandom(1 << 10) for _ in range(16))

    def annoy(num_times: int) -> None:
        total = peers.counts.num_failed + peers.counts.num_strangers + num_times
        for _ in range(num_times):
            with socket.create_connection(("127.0.0.1", port_of(peers)), timeout=5) as client:
                client.sendall(next(random_bytes))
            peers.receive()
        _until(peers, lambda: peers.counts.num_failed + peers.counts.num_strangers == total)

    annoy(200)
    descriptors, rss_bytes = num_descriptors(), _rss_bytes()
    annoy(800)
    assert num_descriptors() <= descriptors
    assert _rss_bytes() - rss_bytes < 1 << 20


def test_unlisted_keys_under_a_flood_are_noted_up_to_a_bound(peers: PeerListener) -> None:
    with PeerListener("127.0.0.1", 0, Credentials(LISTENER.keys, _Nobody())) as closed:  # type: ignore[arg-type]
        for _ in range(20):
            with Connection(closed.endpoint, INCARNATION, Credentials(new_keys()), LISTENER.keys.public) as connection:
                _until_refused(connection, closed)
        assert len(closed.news()) == 16
        assert closed.counts.num_refused >= 20
    assert peers.counts.num_refused == 0


class _Nobody:
    """An allow-list without anybody."""

    def __contains__(self, key: object) -> bool:
        return False

    def reload(self) -> None:
        return None


def _until_refused(connection: Connection, listener: PeerListener) -> None:
    deadline_s = time.monotonic() + 5
    while not connection.refusal:
        assert time.monotonic() < deadline_s
        Selector([connection, listener]).wait(0.1)
        assert listener.receive() is None
        connection.receive()


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


_OTHER_USER = """
import os, sys, time
from kvxfer.control.channel import REMOTE, WorkerConnection
if os.geteuid() == 0:
    os.setgroups([0])  # of the group, so that the directory and the socket let it through
    os.setuid(12345)
connection = WorkerConnection(sys.argv[1])
connection.send(REMOTE, b"let me in")
print("sent", flush=True)
sys.stdin.read()
connection.close()
"""


def test_a_worker_of_another_user_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that shares the group. Root plays that user, anybody else plays the agent of another one."""
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with tempfile.TemporaryDirectory(prefix="kvxfer-") as directory:
        os.chmod(directory, 0o750)
        with WorkerListener(directory) as listener:
            command = [sys.executable, "-c", _OTHER_USER, directory]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
                assert stranger.stdout is not None
                assert stranger.stdout.readline() == b"sent\n"
                assert Selector([listener]).wait(0.5) == []
                assert listener.receive() is None
                stranger.communicate()
            assert stranger.returncode == 0


def test_a_ticket_that_is_too_long_is_not_even_decoded() -> None:
    with pytest.raises(ProtocolError, match=r"^ticket: got 1048577 characters, expected at most 1048576"):
        decode_ticket("A" * (MAX_TICKET_CHARS + 1))
    key = "k" * 40
    sources = [Source(endpoint="t" * 256, incarnation="f" * 32, key=key) for _ in range(MAX_SOURCES)]
    ticket = Ticket(transfer="0" * 32, sources=tuple(sources))
    assert decode_ticket(encode_ticket(ticket)) == ticket


def test_a_peer_whose_messages_are_not_read_fills_its_own_queue(peers: PeerListener) -> None:
    """What the listener keeps of each is bounded, so others are served in turn; nothing is lost."""
    num_sent = 400
    with connect(peers.endpoint) as flood, connect(peers.endpoint, "cd" * 16) as other:
        flood.send(REMOTE, b"x")
        next_frame(peers)
        for _ in range(num_sent):
            assert flood.send(REMOTE, bytes(5_000))
        other.send(REMOTE, b"hello")
        heard = [next_frame(peers) for _ in range(num_sent + 1)]
        assert sum(frame == b"hello" for _, frame in heard) == 1
        assert heard.index((b"cd" * 16, b"hello")) < num_sent  # served in turn, not behind the flood


_FEW_DESCRIPTORS = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
import kvxfer.control.channel, kvxfer.control.peer_channel as peer_channel
for module in (kvxfer.control.channel, peer_channel):
    module.HANDSHAKE_MS = 500
from kvxfer.control.auth import KeyPair
with peer_channel.PeerListener("127.0.0.1", 0, peer_channel.Credentials(KeyPair(*sys.argv[1:]))) as listener:
    print(listener.endpoint, flush=True)
    selector = kvxfer.control.channel.Selector([listener])
    while listener.receive() is None:
        selector.wait(0.2)
    counts = listener.counts
    print(json.dumps([counts.num_accepted, counts.num_admitted, counts.num_failed + counts.num_strangers]), flush=True)
"""


def test_a_process_without_descriptors_recovers() -> None:
    """More connections than it may have: those that say nothing are ended, then the next peer is let in."""
    command = [sys.executable, "-c", _FEW_DESCRIPTORS, LISTENER.keys.public, LISTENER.keys.secret]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        for _ in range(80):
            stack.enter_context(socket.create_connection(address, timeout=5))
        connection = stack.enter_context(connect(endpoint))
        connection.send(REMOTE, b"hello")
        num_accepted, num_admitted, num_others = json.loads(process.stdout.readline())
        assert num_accepted > 80
        assert num_admitted == 1
        assert num_others >= 30  # the others were accepted just now
        assert process.wait(10) == 0
