"""Processes that move the bytes of large loopback writes: for wires that are faster than one thread copies.

An agent's own threads would have to wait for its interpreter's lock after each copy. These processes share none with
it, and it spends a few system calls on a write.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import TransportError
from kvxfer.transports import _loopback_copier as copier

_PART_BYTES = 2 << 20
"""Writes are cut into parts of at least this size; the next free process takes the next part."""
_MAX_PARTS_OUT = 256
"""Parts that are out at a time, so that neither pipe is ever full: each holds 64 KiB."""
_PARK_TIMEOUT_S = 30.0
_TUNABLE = "glibc.cpu.x86_non_temporal_threshold=0x40000"
"""Of the processes: memmove stores parts past the caches, which the target's process does not share anyway. By default
it does so from most of a last-level cache on, and first reads what it is about to overwrite: 7 GB/s a thread where this
makes 12."""
_PARK_JOB = copier.JOB.pack(copier.PARK, 0, 0, 0, 0, 0).ljust(copier.JOB_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous copy between two mappings; offsets and lengths in bytes."""

    src: int
    src_offset: int
    dst: int
    dst_offset: int
    num_bytes: int


class CopyProcesses:
    """`num_processes` processes that take parts from one pipe and answer in another.

    The thread that makes them must live as long as they shall: Linux kills them when it ends, so that none of them
    writes anything after the agent's death. Of one thread; `close()` ends them.
    """

    def __init__(self, num_processes: int) -> None:
        self._parts_left: dict[int, int] = {}
        self._backlog: deque[bytes] = deque()
        self._num_out = 0
        self._keys = itertools.count(1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.controls: list[socket.socket] = []
        self._job_fd = self.done_fd = -1
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            job_fd, self._job_fd = os.pipe2(os.O_CLOEXEC)
            self.done_fd, done_fd = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self.done_fd, False)
            try:
                for _ in range(num_processes):
                    self._start(job_fd, done_fd)
            finally:
                os.close(job_fd)
                os.close(done_fd)
            on_error.pop_all()

    def _start(self, job_fd: int, done_fd: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.controls.append(ours)
        ours.settimeout(_PARK_TIMEOUT_S)
        with theirs:
            fds = (job_fd, done_fd, theirs.fileno())
            arguments = [sys.executable, "-I", "-S", str(Path(copier.__file__)), *map(str, fds), str(os.getpid())]
            # A session of its own: a Ctrl-C at the terminal reaches the agent alone.
            self._processes.append(
                subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    env=_environment(),
                    start_new_session=True,
                )
            )

    @property
    def has_backlog(self) -> bool:
        """Whether parts wait for others to be copied first."""
        return bool(self._backlog)

    def map(self, fd: int, num_bytes: int) -> int:
        """Map the whole memfd `fd` in every process; the number of the mapping. Raises `TransportError`."""
        key = next(self._keys)
        with self._parked():
            self._tell(copier.MAP, key, num_bytes, fd)
        return key

    def unmap(self, keys: set[int]) -> None:
        """Let go of mappings. Parts of theirs that are being copied are finished first, others are not begun.

        Raises `TransportError`.
        """
        backlog, self._backlog = self._backlog, deque()
        for record in backlog:
            job, src, _, dst, _, _ = copier.JOB.unpack_from(record)
            if keys.isdisjoint((src, dst)):
                self._backlog.append(record)
            else:
                self._count_part(job)
        with self._parked():
            for key in keys:
                self._tell(copier.UNMAP, key)

    @contextlib.contextmanager
    def _parked(self) -> Iterator[None]:
        """Within, no bytes move: all parts that were given out have been copied. Raises `TransportError`."""
        try:
            os.write(self._job_fd, _PARK_JOB * len(self.controls))  # each takes one, and no more until it may go on
            for control in self.controls:
                if control.recv(len(copier.PARKED)) != copier.PARKED:
                    raise TransportError("a copying process has ended, expected it to live as long as its transport")
            yield
            self._tell(copier.GO, 0)
        except OSError as error:
            raise TransportError(f"copying processes: got {error}, expected an answer from each") from error

    def _tell(self, verb: int, key: int, num_bytes: int = 0, fd: int | None = None) -> None:
        order = copier.ORDER.pack(verb, key, num_bytes)
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        for control in self.controls:
            control.sendmsg([order], rights)

    def submit(self, job: int, pieces: list[Piece]) -> None:
        """Copy `pieces`, at least one; `ended()` names the `job`, a number above 0, once all are copied.

        Raises `OSError` where the processes have ended.
        """
        records = [record for piece in pieces for record in self._cut(job, piece)]
        self._parts_left[job] = len(records)
        self._backlog.extend(records)
        self._give_out()

    def _cut(self, job: int, piece: Piece) -> Iterator[bytes]:
        num_parts = max(1, min(len(self.controls), piece.num_bytes // _PART_BYTES))
        part_bytes = -(-piece.num_bytes // num_parts)
        for first in range(0, piece.num_bytes, part_bytes):
            num_bytes = min(part_bytes, piece.num_bytes - first)
            record = copier.JOB.pack(
                job, piece.src, piece.src_offset + first, piece.dst, piece.dst_offset + first, num_bytes
            )
            yield record.ljust(copier.JOB_BYTES, b"\0")

    def _give_out(self) -> None:
        count = min(len(self._backlog), _MAX_PARTS_OUT - self._num_out)
        if count > 0:
            self._num_out += count
            os.write(self._job_fd, b"".join([self._backlog.popleft() for _ in range(count)]))

    def ended(self) -> tuple[list[int], float]:
        """The jobs that were copied since the last call, and for how many seconds processes have copied meanwhile.

        Raises `OSError` where the processes have ended.
        """
        try:
            records = os.read(self.done_fd, _MAX_PARTS_OUT * copier.DONE.size)
        except BlockingIOError:
            return [], 0.0
        jobs = []
        num_busy_ns = 0
        for job, busy_ns in copier.DONE.iter_unpack(records):
            self._num_out -= 1
            num_busy_ns += busy_ns
            if self._count_part(job):
                jobs.append(job)
        self._give_out()
        return jobs, num_busy_ns * 1e-9

    def _count_part(self, job: int) -> bool:
        """One part more is over; whether it was the last of its job."""
        self._parts_left[job] -= 1
        if self._parts_left[job]:
            return False
        del self._parts_left[job]
        return True

    def end(self) -> None:
        """End the processes: when it returns, nothing is copied any more. Calling it again does nothing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def close(self) -> None:
        """End the processes and free all descriptors."""
        self.end()
        for control in self.controls:
            control.close()
        for fd in (self._job_fd, self.done_fd):
            if fd >= 0:
                os.close(fd)


def _environment() -> dict[str, str]:
    tunables = filter(None, (os.environ.get("GLIBC_TUNABLES"), _TUNABLE))
    return os.environ | {"GLIBC_TUNABLES": ":".join(tunables)}
