"""One end of writes between processes on one GPU: commands as lines of JSON in, answers as lines of JSON out.

`Peer` starts `python -m benchmarks.gpu_peer ARGUMENTS` and talks to it. The process has one memory, as an agent has its
slots, and a transport that knows it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import select
import statistics
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.errors import KvxferError
from kvxfer.memory import HostMemory
from kvxfer.ops.config import SlotConfig
from kvxfer.slot_memory import SlotMemory
from kvxfer.streams.device import MappedPool, PoolHandle, allocate_pool, map_pool
from kvxfer.streams.driver import check, cuda, gpu
from kvxfer.transports import Outcome, Region, RegionDescriptor, WriteBatch, create_transport, exit_process
from kvxfer.transports.base import MemoryKind

REPLY_S = 60.0
_WRITE_S = 20.0
Kind = Literal["host", "device", "vmm", "imported"]
"""Slots as agents have them on the host and on the GPU; memory of `allocate_pool`; memory of another process."""
Entries = list[list[int]]
"""(byte of the source, byte of the target, length in bytes) of each descriptor."""


class PeerError(Exception):
    """The process raised one of kvxfer's errors."""


@dataclass(frozen=True, slots=True)
class Written:
    """Writes of the same bytes, one after another: how each ended, and seconds from submit to end, the median."""

    outcomes: list[str]
    seconds: float
    path: str
    detail: str


class Peer:
    """A process. Leaving the context ends it, however it is."""

    def __init__(
        self,
        transport: str,
        kind: Kind,
        num_slots: int,
        slot_bytes: int,
        *,
        options: dict[str, object] | None = None,
        handle: str = "",
        fd: int = -1,
        gpu_index: int = 0,
    ) -> None:
        """Start it; `handle`, with `fd` where it has one, names memory of another process for kind `imported`. Other
        memory of a GPU lies on the one of `gpu_index`."""
        self.name = uuid.uuid4().hex
        self.transport = transport
        arguments = {
            "name": self.name,
            "transport": transport,
            "kind": kind,
            "num_slots": num_slots,
            "slot_bytes": slot_bytes,
            "options": options or {},
            "handle": handle,
            "fd": fd,
            "gpu_index": gpu_index,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_peer", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(fd,) if fd >= 0 else (),
        )

    def call(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - whatever JSON says
        """Let the process do something. Raises `PeerError`, also where the process is silent or has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its last words may be there to be read
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], REPLY_S)[0]:
            raise PeerError(f"{do}: got no answer, expected one within {REPLY_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{do}: the process has ended with {self.process.wait(10)}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply["result"]

    def knows(self, target: Peer) -> None:
        """Let it write to `target`, also anew, after that has moved its memory."""
        self.call("add_peer", peer=target.name, metadata=target.call("metadata"))

    def write(self, target: Peer, writes: list[Entries], in_flight: int = 1, repeats: int = 1) -> Written:
        """Make `writes`, so many at a time, all of them `repeats` times."""
        found = self.call(
            "write", peer=target.name, region=target.call("region"), writes=writes, in_flight=in_flight, repeats=repeats
        )
        return Written(**found)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self.process.wait(10)  # it ends with its input
        except subprocess.TimeoutExpired:
            self.kill()


def packed(handle: PoolHandle) -> str:
    """`handle` as an argument."""
    return base64.b64encode(msgspec.json.encode(handle)).decode()


def random_bytes(seed: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """What `fill` puts into a process's memory."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def digest(array: npt.NDArray[np.uint8]) -> str:
    """What `digest` says of a memory that holds `array`."""
    return hashlib.sha256(array.data).hexdigest()


class _Process:
    """The commands, by name."""

    def __init__(
        self,
        name: str,
        transport: str,
        kind: Kind,
        num_slots: int,
        slot_bytes: int,
        options: dict[str, object],
        handle: str,
        fd: int,
        gpu_index: int,
    ) -> None:
        on_gpu = kind != "host"
        self._config = SlotConfig(
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            kind="device" if on_gpu else "pinned_host",
            gpu=gpu_index,
        )
        self.memory: SlotMemory | MappedPool
        if kind == "vmm":
            self.memory = allocate_pool(num_slots * slot_bytes, gpu_index)
        elif kind == "imported":
            decoded = msgspec.json.decode(base64.b64decode(handle), type=PoolHandle)
            self.memory = map_pool(decoded, fd if fd >= 0 else None)
        else:
            self.memory = SlotMemory(self._config)
        self._gpu_index = gpu_index if on_gpu else -1
        self.transport = create_transport(transport, incarnation=name, options=options, gpu_index=self._gpu_index)
        self.descriptor = self.transport.register(self._region())

    def _region(self) -> Region:
        if isinstance(self.memory, SlotMemory):
            return self.memory.region
        pool = self.memory.pool
        return Region(
            pool.address,
            pool.num_bytes,
            kind=MemoryKind.DEVICE,
            device_index=pool.device_index,
            handle=self.memory.handle,
        )

    def metadata(self) -> str:
        return self.transport.metadata().hex()

    def region(self) -> list[int]:
        return [self.descriptor.region_id, self.descriptor.num_bytes]

    def handle(self) -> str:
        """The memory's handle, as kind `imported` takes it."""
        memory = self.memory.memory if isinstance(self.memory, SlotMemory) else self.memory
        assert isinstance(memory, MappedPool)
        return packed(memory.handle)

    def add_peer(self, peer: str, metadata: str) -> None:
        self.transport.add_peer(peer, bytes.fromhex(metadata))

    def write(self, peer: str, region: list[int], writes: list[Entries], in_flight: int, repeats: int) -> Any:  # noqa: ANN401
        batches = [self._batch(region, entries) for entries in writes]
        outcomes: list[str] = []
        details: list[str] = []
        taken_s = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            open_ids: set[int] = set()
            waiting = list(reversed(batches))
            while waiting or open_ids:
                while waiting and len(open_ids) < in_flight:
                    open_ids.add(self.transport.submit_write(peer, waiting.pop()))
                if not select.select([self.transport.fileno()], [], [], _WRITE_S)[0]:
                    raise KvxferError(f"got no end of {len(open_ids)} writes, expected one within {_WRITE_S:.0f} s")
                for end in self.transport.poll():
                    open_ids.discard(end.write_id)
                    outcomes.append(end.outcome.value)
                    details += [end.detail] if end.outcome is not Outcome.DONE else []
            taken_s.append(time.perf_counter() - began_s)
        return {
            "outcomes": outcomes,
            "seconds": statistics.median(taken_s),
            "path": self.transport.path(peer),
            "detail": "; ".join(sorted(set(details))),
        }

    def _batch(self, region: list[int], entries: Entries) -> WriteBatch:
        columns = np.array(entries, dtype=np.uint64).reshape(-1, 3)
        address = np.uint64(self._region().address)
        return WriteBatch(
            RegionDescriptor(*region), columns[:, 0] + address, columns[:, 1].copy(), columns[:, 2].copy()
        )

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        array = random_bytes(seed, self.descriptor.num_bytes)
        if isinstance(self.memory, SlotMemory) and isinstance(self.memory.memory, HostMemory):
            self.memory.memory.array[:] = array
            return
        with gpu(self._gpu_index):
            check("cuMemcpyHtoD", cuda().cuMemcpyHtoD(self._region().address, array.ctypes.data, array.size))

    def digest(self) -> str:
        """Of all bytes."""
        array = np.empty(self.descriptor.num_bytes, dtype=np.uint8)
        if isinstance(self.memory, SlotMemory) and isinstance(self.memory.memory, HostMemory):
            array[:] = self.memory.memory.array
        else:
            with gpu(self._gpu_index):
                check("cuMemcpyDtoH", cuda().cuMemcpyDtoH(array.ctypes.data, self._region().address, array.size))
        return digest(array)

    def rotate(self) -> None:
        self.transport.rotate()

    def move(self) -> None:
        """Move the memory, as an agent moves its slots; what it has left is given back."""
        assert isinstance(self.memory, SlotMemory)
        fresh = SlotMemory(self._config, self.memory.move + 1)
        descriptor = self.transport.register(fresh.region)
        self.transport.deregister(self.descriptor)
        old, self.memory, self.descriptor = self.memory, fresh, descriptor
        if not old.leave():
            self.transport.rotate()
            old.close()

    def free_bytes(self) -> int:
        """Memory of the GPU that nobody has."""
        with gpu(self._gpu_index):
            free_bytes, _ = check("cuMemGetInfo", cuda().cuMemGetInfo())
        return int(free_bytes)

    def close(self) -> None:
        self.transport.close()
        self.memory.close()


def main() -> None:
    """Serve until the input ends."""
    process: _Process | None = None
    try:
        process = _Process(**json.loads(sys.argv[1]))
    except KvxferError as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        exit_process(0)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            _say({"result": getattr(process, name)(**request)})
        except KvxferError as error:
            _say({"error": f"{type(error).__name__}: {error}"})
    process.close()
    exit_process(0)


def _say(reply: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
