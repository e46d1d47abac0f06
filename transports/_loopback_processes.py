"""Processes that move the bytes of large loopback writes: for wires that are faster than one thread copies.

An agent's own threads would have to wait for its interpreter's lock after each copy. These processes share none with
it, and it spends two system calls on a write: one gives out all its parts, one takes the answers that are there.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping

from kvxfer.errors import TransportError
from kvxfer.transports import _loopback_programs as programs
from kvxfer.transports._loopback_paced import PacedWrite
from kvxfer.transports._loopback_peer import LoopbackPeer
from kvxfer.transports._regions import CheckedWrite
from kvxfer.transports.base import Region

_PART_BYTES = 2 << 20
"""Entries are cut into parts of about this size or more; the next free process takes the next part."""
_MAX_PARTS_OUT = 1024
"""Parts of writes that have not ended: no pipe of theirs is ever full for long, each holds 64 KiB."""
_PARK_TIMEOUT_S = 30.0
_TUNABLE = "glibc.cpu.x86_non_temporal_threshold=0x40000"
"""Of the processes: memmove stores parts past the caches, which the target's process does not share anyway. By default
it does so from most of a last-level cache on, and first reads what it is about to overwrite: 7 GB/s a thread where this
makes 12."""
_pack_piece = programs.PIECE.pack
_PARK_JOB = _pack_piece(programs.PARK, 0, 0, 0, 0.0, 0).ljust(programs.PIECE_BYTES, b"\0")
_LEAST_BYTES = 64 << 10
"""What a thread of the agent copies while a job finds its process."""
_MAX_PIECES = 64
_LOST = "a copying process of the wire has ended, expected it to live as long as the transport"


class CopyProcesses:
    """The `Copier` of large writes in host memory: processes that take parts of them from one pipe, and one that hears
    of each and tells the agent of the ends, at the pace of the wire.

    The thread that makes them must live as long as they shall: Linux kills them when it ends, so that none of them
    writes anything after the agent's death. Of one thread; `close()` ends them.
    """

    def __init__(self, num_processes: int, regions: Mapping[int, Region]) -> None:
        """`num_processes` copy. `regions`: those of this side, by their ids, now and later."""
        self._regions = regions
        self._sources: dict[int, int] = {}  # mapping by region
        self._targets: dict[tuple[str, int], int] = {}  # mapping by peer and region
        self._num_parts: dict[int, int] = {}  # by job that has not ended
        self._num_out = 0  # parts of them all
        self._keys = itertools.count(1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[socket.socket] = []
        self.end_fds: tuple[int, ...] = ()
        self._job_fd = self.news_fd = -1
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            with contextlib.ExitStack() as theirs:
                self._start_all(num_processes, theirs)
            on_error.pop_all()
        self._parts = [_parts(max(1, count)) for count in range(num_processes + 1)]

    def _start_all(self, num_processes: int, theirs: contextlib.ExitStack) -> None:
        """`theirs` closes the ends of pipes and sockets that the processes have then."""
        job_fd, self._job_fd = os.pipe2(os.O_CLOEXEC)
        theirs.callback(os.close, job_fd)
        answer_fd, answers_fd = os.pipe2(os.O_CLOEXEC)
        theirs.callback(os.close, answer_fd)
        theirs.callback(os.close, answers_fd)
        self.news_fd, news_fd = os.pipe2(os.O_CLOEXEC)
        theirs.callback(os.close, news_fd)
        os.set_blocking(self.news_fd, False)
        for _ in range(num_processes):
            ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._controls.append(ours)
            ours.settimeout(_PARK_TIMEOUT_S)
            theirs.enter_context(control)
            self._start("copy", job_fd, answers_fd, control.fileno())
        self._start("pace", answer_fd, news_fd)

    def _start(self, what: str, *fds: int) -> None:
        arguments = [sys.executable, "-I", "-S", programs.__file__, what, str(os.getpid()), *map(str, fds)]
        # A session of its own: a Ctrl-C at the terminal reaches the agent alone.
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, pass_fds=fds, env=_environment(), start_new_session=True
        )
        self._processes.append(process)
        self.end_fds = (*self.end_fds, os.pidfd_open(process.pid))

    def takes(self, entries: CheckedWrite, peer: LoopbackPeer, dst_region: int) -> bool:
        """`Copier.takes`: not where entries are many, or small, or out of memory that no other process can map, nor
        while very many are under way."""
        if not self.end_fds:
            raise TransportError(_LOST)
        if not 0 < entries.num_entries <= _MAX_PIECES or entries.least_bytes < _LEAST_BYTES:
            return False
        if self._num_out >= _MAX_PARTS_OUT:
            return False
        for region_id in entries.src_regions:
            if region_id not in self._sources:
                region = self._regions[region_id]
                if region.fd is None:
                    return False
                self._sources[region_id] = self._map(region.fd, region.address, region.num_bytes)
        if (peer.name, dst_region) not in self._targets:
            remote = peer.regions[dst_region]
            self._targets[peer.name, dst_region] = self._map(peer.fds[dst_region], remote.address, remote.num_bytes)
        return True

    def begin(self, write: PacedWrite) -> None:
        """`Copier.begin`."""
        entries, job, due_s = write.entries, write.write_id, write.due_s
        parts = self._parts[min(entries.num_bytes // (_PART_BYTES * entries.num_entries), len(self._controls))]
        num_parts = (len(parts) - 1) * entries.num_entries
        pieces = [
            _pack_piece(job, src, dst, num_bytes, due_s, num_parts).join(parts)
            for src, dst, num_bytes in entries.rows()
        ]
        os.write(self._job_fd, b"".join(pieces))
        self._num_parts[job] = num_parts
        self._num_out += num_parts

    def look(self) -> tuple[list[int], float]:
        """`Copier.look`."""
        jobs = []
        num_busy_ns = 0
        for job, busy_ns in programs.END.iter_unpack(os.read(self.news_fd, _MAX_PARTS_OUT * programs.END.size)):
            self._num_out -= self._num_parts.pop(job)
            num_busy_ns += busy_ns
            jobs.append(job)
        return jobs, num_busy_ns * 1e-9

    def drop_peer(self, peer: LoopbackPeer) -> None:
        """`Copier.drop_peer`."""
        known = [names for names in self._targets if names[0] == peer.name]
        self._unmap([self._targets.pop(names) for names in known])

    def drop_sources(self, region_ids: Collection[int]) -> None:
        """`Copier.drop_sources`."""
        self._unmap([self._sources.pop(region_id) for region_id in region_ids if region_id in self._sources])

    def _map(self, fd: int, address: int, num_bytes: int) -> int:
        """Map the whole memfd `fd`, which lies at `address` here, in every process; the number of the mapping."""
        key = next(self._keys)
        with self._parked():
            self._tell(programs.MAP, key, address, num_bytes, fd)
        return key

    def _unmap(self, keys: list[int]) -> None:
        if keys:
            with self._parked():
                for key in keys:
                    self._tell(programs.UNMAP, key)

    @contextlib.contextmanager
    def _parked(self) -> Iterator[None]:
        """Within, no bytes move: all parts that were given out have been copied. Raises `TransportError`."""
        try:
            os.write(self._job_fd, _PARK_JOB * len(self._controls))  # each takes one, and no more until it may go on
            for control in self._controls:
                if control.recv(len(programs.PARKED)) != programs.PARKED:
                    raise TransportError(_LOST)
            yield
            self._tell(programs.GO)
        except OSError as error:
            raise TransportError(f"copying processes: got {error}, expected an answer from each") from error

    def _tell(self, verb: int, key: int = 0, address: int = 0, num_bytes: int = 0, fd: int | None = None) -> None:
        order = programs.ORDER.pack(verb, key, address, num_bytes)
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        for control in self._controls:
            control.sendmsg([order], rights)

    def give_up(self) -> None:
        """`Copier.give_up`, for good."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        for fd in self.end_fds:
            os.close(fd)
        self.end_fds = ()
        if self.news_fd >= 0:
            os.close(self.news_fd)
            self.news_fd = -1
        for known in (self._num_parts, self._sources, self._targets):
            known.clear()

    def close(self) -> None:
        """`Copier.close`. Calling it again does nothing."""
        self.give_up()
        for control in self._controls:
            control.close()
        self._controls.clear()
        if self._job_fd >= 0:
            os.close(self._job_fd)
            self._job_fd = -1


def _parts(count: int) -> list[bytes]:
    """What follows a piece in the pipe, for each of its parts. The first is empty: a piece that joins them comes before
    each of the others."""
    return [b"", *(programs.PART.pack(part, count) for part in range(count))]


def _environment() -> dict[str, str]:
    tunables = filter(None, (os.environ.get("GLIBC_TUNABLES"), _TUNABLE))
    return os.environ | {"GLIBC_TUNABLES": ":".join(tunables)}
