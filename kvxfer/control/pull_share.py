"""Sharing of a source pool with decode agents of the same host, read-only, so that they can pull rows themselves.

One packet each way over a unix socket (SOCK_SEQPACKET): the decode agent sends `PullRequest`, the prefill agent
answers `PullOffer` with two read-only descriptors, the pool and the lease words, or `PullRefusal`.

A lease word is written by the source alone. It holds a leg's value while its rows may be pulled; the source revokes by
changing it, and whoever pulled looks at it after the copy: rows that were pulled under a changed word are worth
nothing.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.control.handoff_messages import take_fds
from kvxfer.control.messages import Counter, Id
from kvxfer.control.shared_memory import HeldMemory, SharedMemory
from kvxfer.control.socket_dir import Acceptor, SocketClaim, group_only_umask
from kvxfer.errors import ConfigError, HandoffError
from kvxfer.memory import HostMemory, check_memfd

PULL_SOCKET = "pull.sock"
NUM_LEASES = 4096
_MAX_PACKET_BYTES = 4096
_MAX_REQUESTS_PER_POLL = 64
_MAX_SILENT = 64
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decode to prefill: share `pool` of the run `incarnation`."""

    incarnation: Id
    pool: Id


class PullOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="offer"):
    """Prefill to decode: the descriptors that come along are of the pool, where it has one, and of the leases."""

    pool: SharedMemory
    lease_bytes: Counter


class PullRefusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="refusal"):
    """Prefill to decode: nothing is shared."""

    detail: Annotated[str, msgspec.Meta(max_length=1000)]


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(PullRequest)
_answer_decoder = msgspec.msgpack.Decoder(PullOffer | PullRefusal)


class LeaseTable:
    """The source's lease words. A word's value never comes back, so an old lease stays void for ever."""

    def __init__(self) -> None:
        self.memory = HostMemory.create(NUM_LEASES * 8, "kvxfer-leases")
        self._words: npt.NDArray[np.uint64] = self.memory.array.view(np.uint64)
        self._free = deque(range(NUM_LEASES))

    def take(self) -> tuple[int, int] | None:
        """A free word and its value; None when all are in use."""
        if not self._free:
            return None
        word = self._free.popleft()
        self._words[word] += np.uint64(1)
        return word, int(self._words[word])

    def revoke(self, word: int) -> None:
        """End a lease: what is pulled under it from now on is void."""
        self._words[word] += np.uint64(1)
        self._free.append(word)

    def close(self) -> None:
        """Give the memory back."""
        self._words = np.empty(0, dtype=np.uint64)
        self.memory.close()


class PullListener:
    """Prefill side, at `{socket_dir}/pull.sock` (0660), for agents of the same user, or root.

    `path` is what peers are told.
    """

    def __init__(self, socket_dir: str | os.PathLike[str], incarnation: str) -> None:
        """Claim the path and listen. Raises `ConfigError`."""
        self._incarnation = incarnation
        self._claim = SocketClaim(socket_dir, PULL_SOCKET, "pull.lock")
        self.path = str(self._claim.path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._epoll = select.epoll()
        self._silent: deque[socket.socket] = deque()  # connected and have not asked yet, the oldest first
        try:
            with group_only_umask():
                self._socket.bind(self.path)
            self._socket.listen(_MAX_REQUESTS_PER_POLL)
        except OSError as error:
            self.close()
            raise ConfigError(f"socket_dir: cannot listen at {self.path}: {error.strerror}") from error
        self._acceptor = Acceptor(self._socket, self._epoll)

    def fileno(self) -> int:
        """Readable while somebody connects or asks."""
        return self._epoll.fileno()

    def poll(self, pool: str | None, memory: HeldMemory | None, leases: LeaseTable, now_s: float) -> list[str]:
        """Answer who asks; returns what was refused, for the log. Never blocks. Call it when `fileno()` is readable
        and at every tick; `now_s` is a monotonic clock.

        Of those that connect and stay silent some are kept, the newest.
        """
        refused = []
        self._acceptor.look(now_s)
        for _ in range(_MAX_REQUESTS_PER_POLL):
            try:
                accepted = self._acceptor.accept(now_s)
            except HandoffError as error:
                refused.append(str(error))
                break
            if accepted is None:
                break
            self._epoll.register(accepted, select.EPOLLIN)
            self._silent.append(accepted)
        for _ in range(len(self._silent)):
            connection = self._silent.popleft()
            try:
                problem = self._answer(connection, pool, memory, leases)
            except BlockingIOError:
                self._silent.append(connection)
                continue
            except OSError as error:
                problem = f"no answer reaches who asked ({error.strerror})"
            connection.close()
            if problem is not None:
                refused.append(problem)
        while len(self._silent) > _MAX_SILENT:
            self._silent.popleft().close()
            refused.append("asked nothing")
        return refused

    def close(self) -> None:
        """Stop listening and remove the socket."""
        for connection in self._silent:
            connection.close()
        self._epoll.close()
        self._socket.close()
        self._claim.close()

    def _answer(
        self, connection: socket.socket, pool: str | None, memory: HeldMemory | None, leases: LeaseTable
    ) -> str | None:
        packet = connection.recv(_MAX_PACKET_BYTES)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        try:
            request = _request_decoder.decode(packet)
        except (msgspec.MsgspecError, RecursionError) as error:
            return f"pull request: {error}"
        problem = None
        if uid not in (os.geteuid(), 0):
            problem = f"user: got uid {uid}, expected {os.geteuid()} or root"
        elif request.incarnation != self._incarnation or request.pool != pool or memory is None:
            problem = f"pool: got {request.pool} of run {request.incarnation}, expected {pool} of {self._incarnation}"
        if problem is not None:
            connection.send(_encoder.encode(PullRefusal(detail=problem)))
            return problem
        assert memory is not None
        offer = PullOffer(pool=memory.shared, lease_bytes=leases.memory.num_bytes)
        # Opened anew through /proc memfds are read-only: by no mistake of the peer can a mapping of them be written to.
        # A GPU's memory has no such descriptor; who maps it asks CUDA for a mapping without leave to write.
        is_host = memory.shared.gpu is None
        fds = [_open_read_only(fd) for fd in ([memory.fd] if is_host else []) + [leases.memory.fd]]
        try:
            socket.send_fds(connection, [_encoder.encode(offer)], fds if is_host else memory.fds() + fds)
        finally:
            for fd in fds:
                os.close(fd)
        return None


def _open_read_only(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class LeaseWords:
    """Decode side: a source's lease words, mapped read-only. `close()` unmaps them."""

    def __init__(self, memory: HostMemory) -> None:
        """Take over `memory`. `words` is a view, `[NUM_LEASES]` uint64."""
        self._memory = memory
        self.words: npt.NDArray[np.uint64] = memory.array.view(np.uint64)

    def is_leased(self, word: int, value: int) -> bool:
        """Whether the source still grants the lease."""
        return word < self.words.size and int(self.words[word]) == value

    def check(self, lease: tuple[int, int]) -> None:
        """To be called when rows were copied under the lease (word, value). Raises `HandoffError` where the source has
        revoked it: they may be rows of another request."""
        if not self.is_leased(*lease):
            raise HandoffError("the source has revoked the lease on its rows")

    def close(self) -> None:
        """Unmap. Leases that are looked at after this do not hold."""
        self.words = np.empty(0, dtype=np.uint64)
        self._memory.close()


@dataclass(frozen=True, slots=True)
class OfferedPool:
    """Decode side: what a prefill agent shares. The pool is for whoever moves rows here, who maps it; the receiver owns
    both parts."""

    memory: HeldMemory
    leases: LeaseWords

    def close(self) -> None:
        """Let go of both."""
        self.memory.close()
        self.leases.close()


class PullConnection:
    """Decode side of one request. `fileno()` is readable once `poll()` can answer."""

    def __init__(self, path: str, incarnation: str, pool: str) -> None:
        """Ask the prefill agent at `path`. Raises `HandoffError` where there is none on this host."""
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise HandoffError(f"pull socket: {error.strerror}") from error
        try:
            self._socket.connect(path)
            self._socket.send(_encoder.encode(PullRequest(incarnation=incarnation, pool=pool)))
        except OSError as error:
            self._socket.close()
            raise HandoffError(f"pull socket {path}: {errno.errorcode.get(error.errno or 0, error)}") from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def poll(self) -> OfferedPool | None:
        """What is shared, or None while there is no answer. Raises `HandoffError` for a refusal."""
        try:
            packet, ancillary, flags, _ = self._socket.recvmsg(
                _MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise HandoffError(f"pull socket: the prefill agent hung up ({error.strerror})") from error
        fds = take_fds(ancillary)
        try:
            return _parse_answer(packet, fds, flags)
        except HandoffError:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        """Hang up; what was mapped stays."""
        self._socket.close()


def _parse_answer(packet: bytes, fds: list[int], flags: int) -> OfferedPool:
    """What an answer shares. Takes from `fds` what it uses."""
    try:
        answer = _answer_decoder.decode(packet)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HandoffError(f"pull answer: {error}") from error
    if isinstance(answer, PullRefusal):
        raise HandoffError(f"pull: refused: {answer.detail}")
    num_expected = 1 + answer.pool.has_fd
    if len(fds) != num_expected or flags & socket.MSG_CTRUNC:
        has_no_room = len(fds) < num_expected and flags & socket.MSG_CTRUNC
        why = ": this process may open no more (ulimit -n)" if has_no_room else ""
        raise HandoffError(f"pull answer: got {len(fds)} descriptors, expected {num_expected}{why}")
    if answer.pool.gpu is None:
        check_memfd(fds[0], answer.pool.num_bytes)
    if answer.lease_bytes != NUM_LEASES * 8:
        raise HandoffError(f"lease words: got {answer.lease_bytes} bytes, expected {NUM_LEASES * 8}")
    leases = HostMemory.attach(fds.pop(), answer.lease_bytes, "lease words", is_read_only=True)
    return OfferedPool(HeldMemory(answer.pool, *fds), LeaseWords(leases))
