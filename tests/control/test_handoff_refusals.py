"""Hand-offs that are refused: before anything is mapped, with the reason, and without a descriptor left."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from kvxfer.control.handoff_listener import HandoffListener, RefusedHandoff
from kvxfer.control.handoff_messages import LENGTH, MAX_HEADER_BYTES, PoolOffer, pack
from kvxfer.control.shared_memory import SharedMemory
from kvxfer.memory import HostMemory
from tests.control.pools import OFFER, POOL_BYTES, client_of, expect_refusal, layout, memfd, next_events, select_ready

SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


@pytest.mark.parametrize(
    ("num_bytes", "seals", "told"),
    [
        (POOL_BYTES, 0, "got seals 0x0, expected F_SEAL_GROW and F_SEAL_SHRINK"),
        (POOL_BYTES, fcntl.F_SEAL_GROW, "expected F_SEAL_GROW and F_SEAL_SHRINK"),
        (POOL_BYTES, SIZE_SEALS | fcntl.F_SEAL_WRITE, "cannot be mapped for reading and writing"),
        (POOL_BYTES - 1, SIZE_SEALS, "got 8191 bytes, expected the announced 8192"),
        (POOL_BYTES + 4096, SIZE_SEALS, "got 12288 bytes, expected the announced 8192"),
        (0, SIZE_SEALS, "got 0 bytes"),
    ],
)
def test_a_memfd_that_does_not_fit_is_refused(
    listener: HandoffListener, tmp_path: Path, num_bytes: int, seals: int, told: str
) -> None:
    fd = memfd(num_bytes, seals)
    with client_of(tmp_path) as client:
        socket.send_fds(client, [OFFER], [fd])
        os.close(fd)
        expect_refusal(listener, client, told)


def test_a_foreign_file_is_refused(listener: HandoffListener, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(bytes(POOL_BYTES))
    with client_of(tmp_path) as client, (tmp_path / "foreign").open("r+b") as foreign:
        socket.send_fds(client, [OFFER], [foreign.fileno()])
        expect_refusal(listener, client, "expected")
    (tmp_path / "foreign").unlink()


def test_a_descriptor_that_is_no_file_is_refused(listener: HandoffListener, tmp_path: Path) -> None:
    with client_of(tmp_path) as client, socket.socket() as foreign:
        socket.send_fds(client, [OFFER], [foreign.fileno()])
        expect_refusal(listener, client, "expected a memfd")


def test_a_read_only_memfd_is_refused(listener: HandoffListener, tmp_path: Path, memory: HostMemory) -> None:
    fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
    with client_of(tmp_path) as client:
        socket.send_fds(client, [OFFER], [fd])
        os.close(fd)
        expect_refusal(listener, client, "cannot be mapped for reading and writing")


@pytest.mark.parametrize(
    ("num_fds", "told"),
    [(0, "got 0, expected one"), (2, "got 2, expected one"), (3, "got 3"), (60, "more than 4 at once")],
)
def test_any_number_of_descriptors_but_one_is_refused(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory, num_fds: int, told: str
) -> None:
    with client_of(tmp_path) as client:
        socket.send_fds(client, [OFFER], [memory.fd] * num_fds)
        expect_refusal(listener, client, told)


def test_descriptors_that_come_one_by_one_are_counted(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    with client_of(tmp_path) as client:
        socket.send_fds(client, [OFFER[:2]], [memory.fd])
        while select_ready(listener):
            assert listener.poll(time.monotonic()) == []
        socket.send_fds(client, [OFFER[2:]], [memory.fd])
        expect_refusal(listener, client, "got 2, expected one at most")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (LENGTH.pack(MAX_HEADER_BYTES + 1), f"got a length of {MAX_HEADER_BYTES + 1}"),
        (LENGTH.pack((1 << 32) - 1), "got a length of 4294967295"),
        (LENGTH.pack(0), "got a length of 0"),
        (LENGTH.pack(3) + b"\xc1\xc1\xc1", "header: "),
        (LENGTH.pack(100_000) + b"\x91" * 100_000, "header: "),
        (LENGTH.pack(5) + b"\xdd\xff\xff\xff\xff", "header: "),
        (b"GET / HTTP/1.1\r\n\r\n", "got a length of"),
        (pack(PoolOffer(version=1, num_bytes=POOL_BYTES, layout=layout())), "version: got 1, expected 6"),
        (pack(PoolOffer(num_bytes=POOL_BYTES, layout=layout(17))), "ends at byte 8448, but the pool has 8192 bytes"),
        (pack(PoolOffer(num_bytes=1 << 60, layout=layout())), "num_bytes"),
        (
            pack(PoolOffer(num_bytes=0, layout=layout(0), pool=SharedMemory(num_bytes=0))),
            "got 8192 bytes, expected the announced 0",
        ),
        (
            pack(PoolOffer(num_bytes=POOL_BYTES, layout=layout(), pool=SharedMemory(num_bytes=1))),
            "pool: got 1 bytes, expected the announced 8192",
        ),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_header_that_cannot_be_is_refused(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory, data: bytes, told: str
) -> None:
    with client_of(tmp_path) as client:
        socket.send_fds(client, [data], [memory.fd])
        expect_refusal(listener, client, told)


def test_a_worker_that_hangs_up_half_way_is_forgotten(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    with client_of(tmp_path) as client:
        socket.send_fds(client, [OFFER[:10]], [memory.fd])
    (event,) = next_events(listener)
    assert event == RefusedHandoff("the worker hung up after 10 bytes")


def test_another_user_is_refused(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.control.handoff_listener.os.geteuid", lambda: 4711)
    monkeypatch.setattr("kvxfer.control.handoff_listener._PEER_CREDENTIALS", _Credentials(pid=1, uid=4712))
    with client_of(tmp_path) as client:
        socket.send_fds(client, [OFFER], [memory.fd])
        expect_refusal(listener, client, "got uid 4712, expected 4711 or root")


class _Credentials:
    """Stands for `struct ucred`: what the kernel would say of another user's process."""

    size = 12

    def __init__(self, pid: int, uid: int) -> None:
        self._answer = (pid, uid, uid)

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        assert len(data) == self.size
        return self._answer
