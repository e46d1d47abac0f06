"""Answers to a decode agent that asks for a source pool: false ones map nothing, and nothing leaks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvxfer.control.pull_share import NUM_LEASES, OfferedPool, PullConnection, PullOffer
from kvxfer.control.shared_memory import SharedMemory
from kvxfer.errors import HandoffError
from kvxfer.memory import HostMemory
from tests.control.test_pull_share import INCARNATION, NUM_BYTES, POOL, request


class Impostor:
    """Listens where a prefill agent would and answers whatever the test wants."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.path)
        self._socket.listen()

    def answer(self, packet: bytes, fds: list[int]) -> OfferedPool | None:
        """What a decode agent makes of an answer."""
        connection = PullConnection(self.path, INCARNATION, POOL)
        client, _ = self._socket.accept()
        assert client.recv(4096) == request()
        if packet:
            socket.send_fds(client, [packet], fds)
        client.close()
        try:
            return connection.poll()
        finally:
            connection.close()

    def close(self) -> None:
        self._socket.close()


def offer(pool_bytes: int = NUM_BYTES, lease_bytes: int = NUM_LEASES * 8) -> bytes:
    return msgspec.msgpack.encode(PullOffer(pool=SharedMemory(num_bytes=pool_bytes), lease_bytes=lease_bytes))


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Impostor]:
    num_fds = len(os.listdir("/proc/self/fd"))
    made = Impostor(tmp_path / "pull.sock")
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds


@pytest.mark.parametrize(
    ("packet", "kinds", "expected"),
    [
        (b"", "", "Input data was truncated"),
        (b"\xc1", "", "pull answer: "),
        (offer(), "", "got 0 descriptors, expected 2"),
        (offer(), "p", "got 1 descriptors, expected 2"),
        (offer(), "pll", "got 3 descriptors, expected 2"),
        (offer(), "pllllllll", "got 4 descriptors, expected 2"),  # the rest is cut off, and closed by the kernel
        (offer(pool_bytes=NUM_BYTES + 1), "pl", "got 12345 bytes, expected the announced 12346"),
        (offer(pool_bytes=0), "pl", "got 12345 bytes, expected the announced 0"),
        (offer(lease_bytes=8), "pe", "lease words: got 8 bytes, expected 32768"),
        (offer(), "ul", "an unsealed memfd could be shrunk"),
        (offer(), "nl", "got a file that has no seals"),
    ],
)
def test_a_false_answer_maps_nothing(impostor: Impostor, packet: bytes, kinds: str, expected: str) -> None:
    """p: a pool, l: lease words, e: eight sealed bytes, u: an unsealed memfd, n: no memfd."""
    unsealed = os.memfd_create("unsealed")
    os.truncate(unsealed, NUM_BYTES)
    no_memfd = os.open("/dev/null", os.O_RDONLY)
    with (
        HostMemory.create(NUM_BYTES, "pool") as pool,
        HostMemory.create(NUM_LEASES * 8, "leases") as leases,
        HostMemory.create(8, "eight") as eight,
    ):
        by_kind = {"p": pool.fd, "l": leases.fd, "e": eight.fd, "u": unsealed, "n": no_memfd}
        with pytest.raises(HandoffError, match=expected):
            impostor.answer(packet, [by_kind[kind] for kind in kinds])
        os.close(unsealed)
        os.close(no_memfd)
        shared = impostor.answer(offer(), [pool.fd, leases.fd])
        assert shared is not None
        shared.close()


def test_nobody_listens(tmp_path: Path) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HandoffError, match=r"pull socket .*: ENOENT"):
        PullConnection(str(tmp_path / "pull.sock"), INCARNATION, POOL)
    assert len(os.listdir("/proc/self/fd")) == num_fds
