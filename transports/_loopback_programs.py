"""What the processes of an emulated wire do: most copy, one paces. They share no interpreter's lock with the agent.

Run by its path with `python -I -S`, so that it starts in milliseconds; it imports nothing of ours. Arguments: `copy` or
`pace`, the id of the process that started it, and descriptors. It ends when nothing more is to come, and is killed when
that process, or the thread of it that started this one, ends.
"""

from __future__ import annotations

import array
import ctypes
import heapq
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time

PIECE = struct.Struct("=QQQQdI")
"""Job (0: park), addresses of source and target in the agent, bytes; when the job is due, on the monotonic clock in
seconds, and the parts of all its pieces."""
PART = struct.Struct("=II12x")
"""Which part of the piece this is, of how many."""
PIECE_BYTES = PIECE.size + PART.size
"""Of a piece and its part in the pipe. Divides a page, and is written and read in one: no reader sees half of one."""
ANSWER = struct.Struct("=QdQQ")
"""To a part: job, when it is due, its parts, nanoseconds that the copy took."""
END = struct.Struct("=QQ")
"""Job, nanoseconds that its copies took together."""
ORDER = struct.Struct("=BQQQ")
"""Verb, mapping, its address in the agent, bytes; `MAP` comes with a descriptor."""
PARK = 0
MAP, UNMAP, GO = range(3)
PARKED = b"parked"

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29  # linux/prctl.h
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system
_READ_BYTES = 1024 * ANSWER.size
_DESCRIPTOR_BYTES = array.array("i").itemsize


class Mapping:
    """Shared memory of an agent or of its peer, which the agent has mapped at `address`.

    Where all its pages are there, as those of slots are, they are mapped at once, and not one by one in the first
    copies. A pool may have pages that nobody has touched: those are not taken.
    """

    def __init__(self, fd: int, address: int, num_bytes: int) -> None:
        """Take over `fd`."""
        is_backed = os.fstat(fd).st_blocks * _BLOCK_BYTES >= num_bytes
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_backed else 0)
        try:
            self._mapping = mmap.mmap(fd, num_bytes, flags)
        finally:
            os.close(fd)
        self.address = address
        self.end = address + num_bytes
        self.shift = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)) - address

    def close(self) -> None:
        self._mapping.close()


class Mappings:
    """The memory of an agent and its peers, as far as it is mapped in this process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._mappings: dict[int, Mapping] = {}

    def serve(self) -> bool:
        """Say that nothing is copied here, then take orders; whether to go on."""
        self._control.send(PARKED)
        while True:
            order, ancillary, _, _ = self._control.recvmsg(ORDER.size, socket.CMSG_SPACE(_DESCRIPTOR_BYTES))
            if not order:
                return False
            verb, key, address, num_bytes = ORDER.unpack(order)
            if verb == GO:
                return True
            if verb == UNMAP:
                self._mappings.pop(key).close()
            else:
                (fd,) = array.array("i", ancillary[0][2])
                self._mappings[key] = Mapping(fd, address, num_bytes)

    def copy(self, src: int, dst: int, num_bytes: int) -> None:
        ctypes.memmove(self._here(dst), self._here(src), num_bytes)

    def _here(self, address: int) -> int:
        return next(address + each.shift for each in self._mappings.values() if each.address <= address < each.end)


def copy(job_fd: int, answer_fd: int, control_fd: int) -> None:
    """Copy until there are no more jobs to come."""
    with socket.socket(fileno=control_fd) as control:
        mappings = Mappings(control)
        while record := os.read(job_fd, PIECE_BYTES):
            job, src, dst, num_bytes, due_s, num_job_parts = PIECE.unpack_from(record)
            if job == PARK:
                if not mappings.serve():
                    return
                continue
            part, num_parts = PART.unpack_from(record, PIECE.size)
            first, end = num_bytes * part // num_parts, num_bytes * (part + 1) // num_parts
            began_ns = time.perf_counter_ns()
            mappings.copy(src + first, dst + first, end - first)
            os.write(answer_fd, ANSWER.pack(job, due_s, num_job_parts, time.perf_counter_ns() - began_ns))


class Pacer:
    """Jobs whose ends are held back until the wire lets them pass."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int]] = {}  # parts that are still to be copied; what the others took
        self._due: list[tuple[float, int]] = []  # a heap: on the wire
        self._late: list[int] = []  # have passed it, and are still being copied

    def hear(self, answers: bytes) -> None:
        """Take what copying processes have answered."""
        for job, due_s, num_parts, num_ns in ANSWER.iter_unpack(answers):
            if job not in self._left:
                self._left[job] = num_parts, 0
                heapq.heappush(self._due, (due_s, job))
            num_left, num_busy_ns = self._left[job]
            self._left[job] = num_left - 1, num_busy_ns + num_ns

    def ends(self) -> bytes:
        """What the agent is to hear now, in the order of the wire."""
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            self._late.append(heapq.heappop(self._due)[1])
        ended = [job for job in self._late if not self._left[job][0]]
        self._late = [job for job in self._late if self._left[job][0]]
        return b"".join(END.pack(job, self._left.pop(job)[1]) for job in ended)

    def wait(self, answer_fd: int) -> None:
        """Until a job is due or, where nothing else is to come first, until there are answers."""
        wait_s = max(self._due[0][0] - time.monotonic(), 0.0) if self._due else None
        if wait_s is None or self._late:
            select.select([answer_fd], [], [], wait_s)
        else:
            time.sleep(wait_s)  # one switch of processes for a job, not one for each of its parts


def pace(answer_fd: int, end_fd: int) -> None:
    """Hold ends back until there are no more answers to come.

    An agent that waited for them itself would set a timer for each, which costs it more than to hear of the end.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # nanosecond
    os.set_blocking(answer_fd, False)
    pacer = Pacer()
    while True:
        pacer.wait(answer_fd)
        try:
            answers = os.read(answer_fd, _READ_BYTES)
        except BlockingIOError:
            pass
        else:
            if not answers:
                return
            pacer.hear(answers)
        ends = pacer.ends()
        if ends:
            os.write(end_fd, ends)


def main(what: str, parent_pid: int, fds: list[int]) -> None:
    """Do it, as long as the process that started this one lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return  # it ended before the call
    if what == "copy":
        copy(*fds)
    else:
        pace(*fds)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(fd) for fd in sys.argv[3:]])
