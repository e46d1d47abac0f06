"""A process that copies for an emulated wire: it shares no interpreter's lock with the agent.

Run by its path with `python -I -S`, so that it starts in milliseconds; it imports nothing of ours. Arguments: the
descriptors of the jobs, of what is done and of the control socket, and the id of the process that started it. It ends
when the jobs end, and is killed when that process, or the thread of it that started this one, ends.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import time

JOB = struct.Struct("=QQQQQQ")
"""Job (0: park), source mapping, byte in it, target mapping, byte in it, length. Divides no page: see `JOB_BYTES`."""
JOB_BYTES = 64
"""Of a job in the pipe. Divides a page, and is written and read in one piece: no reader sees half of one."""
DONE = struct.Struct("=QQ")
"""Job, nanoseconds that its copy took."""
ORDER = struct.Struct("=BQQ")
"""Verb, mapping, bytes; `MAP` comes with a descriptor."""
PARK = 0
MAP, UNMAP, GO = range(3)
PARKED = b"parked"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system
_DESCRIPTOR_BYTES = array.array("i").itemsize


class Mapping:
    """Shared memory of an agent or of its peer.

    Where all its pages are there, as those of slots are, they are mapped at once, and not one by one in the first
    copies. A pool may have pages that nobody has touched: those are not taken.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Take over `fd`."""
        is_backed = os.fstat(fd).st_blocks * _BLOCK_BYTES >= num_bytes
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_backed else 0)
        try:
            self._mapping = mmap.mmap(fd, num_bytes, flags)
        finally:
            os.close(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def close(self) -> None:
        self._mapping.close()


def _serve(control: socket.socket, mappings: dict[int, Mapping]) -> bool:
    """Say that nothing is copied here, then do what the agent says; whether to go on."""
    control.send(PARKED)
    while True:
        order, ancillary, _, _ = control.recvmsg(ORDER.size, socket.CMSG_SPACE(_DESCRIPTOR_BYTES))
        if not order:
            return False
        verb, key, num_bytes = ORDER.unpack(order)
        if verb == GO:
            return True
        if verb == UNMAP:
            mappings.pop(key).close()
        else:
            (fd,) = array.array("i", ancillary[0][2])
            mappings[key] = Mapping(fd, num_bytes)


def main(job_fd: int, done_fd: int, control_fd: int, parent_pid: int) -> None:
    """Copy until there are no more jobs to come."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return  # it ended before the call
    mappings: dict[int, Mapping] = {}
    with socket.socket(fileno=control_fd) as control:
        while record := os.read(job_fd, JOB_BYTES):
            job, src, src_byte, dst, dst_byte, num_bytes = JOB.unpack_from(record)
            if job == PARK:
                if not _serve(control, mappings):
                    return
                continue
            began_ns = time.perf_counter_ns()
            ctypes.memmove(mappings[dst].address + dst_byte, mappings[src].address + src_byte, num_bytes)
            os.write(done_fd, DONE.pack(job, time.perf_counter_ns() - began_ns))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
