"""One side of a transfer as a process of its own: JSON lines in, JSON lines out.

The test makes the memory and hands it over by descriptor, so it can fill and judge it whatever the process is doing.
Its arguments are one JSON object: transport, incarnation, options, fd, num_bytes.
"""

from __future__ import annotations

import json
import os
import pathlib
import select
import sys
import time
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvxfer.errors import KvxferError
from kvxfer.memory import HostMemory
from kvxfer.transports import (
    ContiguousWrite,
    MemoryKind,
    Region,
    RegionDescriptor,
    WriteBatch,
    create_transport,
    exit_process,
)


def strided(count: int, length: int, src_stride: int, dst_stride: int) -> list[list[int]]:
    """`count` entries (source offset, destination offset, length) that no engine can merge."""
    return [[i * src_stride, i * dst_stride, length] for i in range(count)]


class Peer:
    """The commands, by name."""

    def __init__(self, transport: str, incarnation: str, options: dict[str, object], fd: int, num_bytes: int) -> None:
        self.name = transport
        self.incarnation = incarnation
        self.options = options
        self.memory = HostMemory.attach(fd, num_bytes)
        self.region = Region(self.memory.address, num_bytes, self.memory.fd)
        self.before = self.resources()
        self.open()

    def open(self) -> None:
        self.transport = create_transport(self.name, incarnation=self.incarnation, options=self.options)
        self.descriptor = self.transport.register(self.region)

    def reopen(self) -> None:
        self.transport.close()
        self.open()

    def metadata(self) -> str:
        return self.transport.metadata().hex()

    def add_peer(self, peer: str, metadata: str) -> None:
        self.transport.add_peer(peer, bytes.fromhex(metadata))

    def drop_peer(self, peer: str) -> None:
        self.transport.drop_peer(peer)

    def rotate(self) -> None:
        self.transport.rotate()

    def path(self, peer: str) -> str:
        return self.transport.path(peer)

    def write(
        self, peer: str, entries: list[list[int]], region: list[int] | None = None, contiguous: bool = False
    ) -> int:
        """Submit one write, as a table or as the one entry that it is; source offsets count from the start of this
        side's memory."""
        target = RegionDescriptor(*(region or (self.descriptor.region_id, self.memory.num_bytes)))
        if contiguous:
            ((src, dst, length),) = entries
            return self.transport.submit_write(peer, ContiguousWrite(target, self.memory.address + src, dst, length))
        columns = np.array(entries, dtype=object).reshape(-1, 3)
        src_addresses = _words(self.memory.address + columns[:, 0])
        batch = WriteBatch(target, src_addresses, _words(columns[:, 1]), _words(columns[:, 2]))
        return self.transport.submit_write(peer, batch)

    def write_strided(self, peer: str, shape: list[int]) -> int:
        return self.write(peer, strided(*shape))

    def write_many(self, peer: str, batches: list[list[list[int]]]) -> list[int]:
        return [self.write(peer, entries) for entries in batches]

    def wait(self, count: int, timeout_s: float) -> list[list[object]]:
        """The next `count` completions, or those that came within `timeout_s` of the call."""
        ended: list[list[object]] = []
        give_up_s = time.monotonic() + timeout_s
        while len(ended) < count and (left_s := give_up_s - time.monotonic()) > 0:
            if select.select([self.transport.fileno()], [], [], left_s)[0]:
                ended += [[end.write_id, end.outcome.value, end.detail] for end in self.transport.poll()]
        return ended

    def register_cycles(self, count: int) -> None:
        for _ in range(count):
            self.transport.deregister(self.descriptor)
            self.descriptor = self.transport.register(self.region)

    def register_odd(self, address_shift: int, num_bytes: int, kind: str) -> None:
        self.transport.register(Region(self.memory.address + address_shift, num_bytes, kind=MemoryKind(kind)))

    def deregister_unknown(self) -> None:
        self.transport.deregister(RegionDescriptor(10**6, 1))

    def register_more(self, num_bytes: int) -> list[int]:
        """Register memory of this process's own; its region as [id, bytes]."""
        self.more = HostMemory.create(num_bytes, "more")
        added = self.transport.register(Region(self.more.address, num_bytes, self.more.fd))
        return [added.region_id, added.num_bytes]

    def more_sum(self) -> int:
        return int(self.more.array.sum())

    def close(self) -> None:
        self.transport.close()
        self.transport.close()

    def close_and_count(self) -> dict[str, int]:
        """What this process holds after its transport was closed, beyond what it held before it made one."""
        self.transport.close()
        held = self.resources()
        return {key: held[key] - self.before[key] for key in held}

    def resources(self) -> dict[str, int]:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        }

    def idle_cpu_share(self, seconds: float) -> float:
        started_s = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - started_s) / seconds

    def facts(self) -> dict[str, object]:
        limits = self.transport.limits
        counters = self.transport.counters
        return {
            "torch": "torch" in sys.modules,
            "failed_write_stops": limits.failed_write_stops,
            "rotate_stops_peer_writes": limits.rotate_stops_peer_writes,
            "num_writes": counters.num_writes,
            "num_descriptors": counters.num_descriptors,
            "num_bytes": counters.num_bytes,
        }


def _words(values: Iterable[int]) -> npt.NDArray[np.uint64]:
    # Modulo 2**64, as a hostile or confused caller's arithmetic would wrap.
    return np.array([int(value) % (1 << 64) for value in values], dtype=np.uint64)


def main() -> None:
    peer = Peer(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            reply = {"result": getattr(peer, name)(**request)}
        except KvxferError as error:
            reply = {"error": type(error).__name__, "detail": str(error)}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        if name == "close":
            break
    exit_process(0) if os.environ.get("KVXFER_TEST_EXIT") == "exit_process" else sys.exit(0)


if __name__ == "__main__":
    main()
