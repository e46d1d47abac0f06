"""Sharing a source pool on one host: who gets it, what is refused, that it is read-only, and that nothing leaks."""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvxfer.control.pull_share import (
    NUM_LEASES,
    LeaseTable,
    OfferedPool,
    PullConnection,
    PullListener,
    PullOffer,
    PullRequest,
)
from kvxfer.control.shared_memory import HeldMemory, SharedMemory, describe
from kvxfer.errors import ConfigError, HandoffError
from kvxfer.memory import HostMemory
from tests.control.waiting import no_more_descriptors

INCARNATION, POOL = "a" * 32, "b" * 32
NUM_BYTES = 12_345
WAIT_S = 5.0


class Source:
    """What a prefill agent shares, and the socket at which it does."""

    def __init__(self, path: Path) -> None:
        self.memory = HostMemory.create(NUM_BYTES, "pool")
        self.memory.array[:] = np.arange(NUM_BYTES) % 251
        self.leases = LeaseTable()
        self.listener = PullListener(path, INCARNATION)

    @property
    def held(self) -> HeldMemory:
        return HeldMemory(describe(self.memory), self.memory.fd)

    def poll(self) -> list[str]:
        return self.listener.poll(POOL, self.held, self.leases, time.monotonic())

    def raw(self) -> socket.socket:
        """A client that says what the test wants."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(WAIT_S)
        client.connect(self.listener.path)
        return client

    def share(self) -> OfferedPool:
        connection = PullConnection(self.listener.path, INCARNATION, POOL)
        assert self.poll() == []
        shared = connection.poll()
        connection.close()
        assert shared is not None
        return shared

    def close(self) -> None:
        self.listener.close()
        self.leases.close()
        self.memory.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    num_fds = len(os.listdir("/proc/self/fd"))
    made = Source(tmp_path / "agent")
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds


def request(incarnation: str = INCARNATION, pool: str = POOL) -> bytes:
    return msgspec.msgpack.encode(PullRequest(incarnation=incarnation, pool=pool))


def mapped(shared: OfferedPool) -> HostMemory:
    """The pool, as whoever moves rows maps it."""
    (fd,) = shared.memory.fds()
    return HostMemory.attach(os.dup(fd), shared.memory.shared.num_bytes, is_read_only=True)


def is_readable(listener: PullListener) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


def test_the_pool_and_its_leases_are_shared(source: Source) -> None:
    assert not is_readable(source.listener)
    connection = PullConnection(source.listener.path, INCARNATION, POOL)
    assert connection.poll() is None
    assert is_readable(source.listener)
    assert source.poll() == []
    assert select.select([connection], [], [], WAIT_S)[0]
    shared = connection.poll()
    connection.close()
    assert shared is not None
    with mapped(shared) as memory:
        np.testing.assert_array_equal(memory.array, source.memory.array)
        source.memory.array[-1] = 255
        assert memory.array[-1] == 255  # the same memory, not a copy
    lease = source.leases.take()
    assert lease is not None
    assert shared.leases.is_leased(*lease)
    shared.leases.check(lease)
    source.leases.revoke(lease[0])
    assert not shared.leases.is_leased(*lease)
    with pytest.raises(HandoffError, match="the source has revoked the lease on its rows"):
        shared.leases.check(lease)
    assert not shared.leases.is_leased(NUM_LEASES, 1)
    shared.close()
    assert not shared.leases.is_leased(*lease)


def test_what_is_shared_cannot_be_written(source: Source) -> None:
    with source.raw() as client:
        client.send(request())
        assert source.poll() == []
        packet, fds, _, _ = socket.recv_fds(client, 4096, 4)
    offer = msgspec.msgpack.decode(packet, type=PullOffer)
    assert offer == PullOffer(pool=SharedMemory(num_bytes=NUM_BYTES), lease_bytes=NUM_LEASES * 8)
    try:
        for fd, num_bytes in zip(fds, (NUM_BYTES, NUM_LEASES * 8), strict=True):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, b"x", 0)
    finally:
        for fd in fds:
            os.close(fd)
    shared = source.share()
    with mapped(shared) as memory:
        for view in (memory.array, shared.leases.words):
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
        del view
    shared.close()


@pytest.mark.parametrize(
    ("incarnation", "pool", "has_pool", "expected"),
    [
        ("c" * 32, POOL, True, "of run c"),
        (INCARNATION, "d" * 32, True, "pool: got d"),
        (INCARNATION, POOL, False, "expected None"),
    ],
    ids=["another run", "another pool", "no pool"],
)
def test_another_pool_is_refused(source: Source, incarnation: str, pool: str, has_pool: bool, expected: str) -> None:
    connection = PullConnection(source.listener.path, incarnation, pool)
    held_pool, memory = (POOL, source.held) if has_pool else (None, None)
    (problem,) = source.listener.poll(held_pool, memory, source.leases, 0.0)
    assert expected in problem
    with pytest.raises(HandoffError, match="pull: refused: pool: got"):
        connection.poll()
    connection.close()


def test_a_source_without_descriptors_looks_away_for_a_while(source: Source) -> None:
    now_s = time.monotonic()
    connection = PullConnection(source.listener.path, INCARNATION, POOL)
    with no_more_descriptors():
        (problem,) = source.listener.poll(POOL, source.held, source.leases, now_s)
        assert problem == "cannot accept a connection: Too many open files"
        assert not is_readable(source.listener), "the loop would spin"
    assert source.listener.poll(POOL, source.held, source.leases, now_s) == []
    assert connection.poll() is None
    assert source.listener.poll(POOL, source.held, source.leases, now_s + 2) == []
    shared = connection.poll()
    connection.close()
    assert shared is not None
    shared.close()


def test_a_source_without_descriptors_hangs_up_on_who_has_asked(source: Source) -> None:
    connection = PullConnection(source.listener.path, INCARNATION, POOL)
    with no_more_descriptors(but=1):
        problems = source.poll()
    # The kernel wants a descriptor for the next one before it looks whether there is one.
    assert problems == [
        "cannot accept a connection: Too many open files",
        "no answer reaches who asked (Too many open files)",
    ]
    with pytest.raises(HandoffError, match="pull answer: "):
        connection.poll()
    connection.close()


def test_who_has_no_descriptors_pulls_nothing(source: Source) -> None:
    with no_more_descriptors(), pytest.raises(HandoffError, match="pull socket: Too many open files"):
        PullConnection(source.listener.path, INCARNATION, POOL)
    connection = PullConnection(source.listener.path, INCARNATION, POOL)
    assert source.poll() == []
    with (
        no_more_descriptors(but=1),
        pytest.raises(HandoffError, match="got 1 descriptors, expected 2: this process may open no more"),
    ):
        connection.poll()
    connection.close()


@pytest.mark.parametrize(
    "packet",
    [b"\xc1", b"\x80", request()[:-1], b"\x91" * 3000, request("short"), b"x" * 8192],
    ids=["no msgpack", "no fields", "cut off", "nested", "no id", "too long"],
)
def test_garbage_gets_no_answer_and_the_next_is_served(source: Source, packet: bytes) -> None:
    with source.raw() as client:
        client.send(packet)
        (problem,) = source.poll()
        assert problem.startswith("pull request: ")
        assert client.recv(4096) == b""
    source.share().close()


def test_a_client_that_hangs_up_harms_nobody(source: Source) -> None:
    source.raw().close()
    with source.raw() as client:
        client.send(request())
    assert len(source.poll()) in (1, 2)  # the kernel takes an answer to a closed peer, or not
    source.share().close()


def test_a_client_that_asks_late_is_heard_then(source: Source) -> None:
    """Connecting and asking are two calls: the agent may look in between, and nothing else may wake it later."""
    with source.raw() as client:
        assert source.poll() == []
        assert not is_readable(source.listener)
        client.send(request())
        assert is_readable(source.listener)
        assert source.poll() == []
        _, fds, _, _ = socket.recv_fds(client, 4096, 4)
    for fd in fds:
        os.close(fd)


def test_silent_clients_are_bounded_and_hold_up_nobody(source: Source) -> None:
    clients = [source.raw() for _ in range(40)]
    assert source.poll() == []
    clients += [source.raw() for _ in range(40)]
    assert source.poll() == ["asked nothing"] * 16
    assert clients[0].recv(1) == b""
    assert not is_readable(source.listener)
    source.share().close()
    clients[-1].send(request())
    assert source.poll() == []
    _, fds, _, _ = socket.recv_fds(clients[-1], 4096, 4)
    for fd in fds:
        os.close(fd)
    for client in clients:
        client.close()
    assert source.poll() == ["pull request: Input data was truncated"] * 63


_STRANGER = """
import os, socket, sys
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[1])
client.send(bytes.fromhex(sys.argv[2]))
print(flush=True)
answer, fds, _, _ = socket.recv_fds(client, 4096, 4)
print(len(fds), answer.hex())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused() -> None:
    """Though somebody has opened the directory and the socket to all."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        source = Source(Path(directory) / "agent")
        os.chmod(Path(directory) / "agent", 0o755)
        os.chmod(source.listener.path, 0o666)
        with subprocess.Popen(
            [sys.executable, "-c", _STRANGER, source.listener.path, request().hex()], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            (problem,) = source.poll()
            num_fds, _, answer = child.stdout.readline().decode().strip().partition(" ")
        source.close()
    assert problem == "user: got uid 65534, expected 0 or root"
    assert num_fds == "0"
    assert b"refusal" in bytes.fromhex(answer)


def test_a_directory_in_use_is_refused_and_nothing_stays(source: Source, tmp_path: Path) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="is in use by another agent"):
        PullListener(tmp_path / "agent", INCARNATION)
    assert len(os.listdir("/proc/self/fd")) == num_fds
    assert os.stat(source.listener.path).st_mode & 0o777 == 0o660
    source.listener.close()
    assert not Path(source.listener.path).exists()
    source.listener = PullListener(tmp_path / "agent", INCARNATION)


def test_leases_run_out_and_come_back_with_other_values() -> None:
    leases = LeaseTable()
    taken = [leases.take() for _ in range(NUM_LEASES)]
    assert len({lease[0] for lease in taken if lease is not None}) == NUM_LEASES
    assert leases.take() is None
    word, value = taken[7] or (0, 0)
    leases.revoke(word)
    again = leases.take()
    assert again is not None
    assert again[0] == word
    assert again[1] > value
    assert leases.take() is None
    leases.close()
