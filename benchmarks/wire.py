"""The emulated wire alone, between two processes: the rate that it reaches, and what it costs the agent's interpreter.

`python -m benchmarks.wire [--gb-s X] [--segment-mib N,N] [--in-flight N] [--copiers N,N] [--threads N,N] [--loop-us N]
[--seconds S] [--json]`

A writer keeps `--in-flight` writes of one segment each on their way into the memory of another process, eight segments
large on both sides, as an agent's slots are. For each write its loop computes `--loop-us` microseconds of Python, as an
agent's loop does. Beside it stands what threads that do nothing else copy on this machine with plain `memmove`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import sys
import threading
import time
from dataclasses import asdict, dataclass

from kvxfer.cli import protocol
from kvxfer.cli.ensemble import Wire
from kvxfer.cli.harness import Cast
from kvxfer.errors import KvxferError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.transports import ContiguousWrite, Outcome, Region, RegionDescriptor
from kvxfer.transports.loopback import LoopbackTransport
from kvxfer.transports.loopback_options import LoopbackOptions

_MIB = 1 << 20
_NUM_SLOTS = 8
_FILL = 0xA7
_TIMEOUT_S = 60.0
_WAIT_S = 5.0
_PART_BYTES = 8 * _MIB


@dataclass(frozen=True, slots=True)
class WireResult:
    """One run. Microseconds are processor time for each write: of the thread with the loop, without what it was told to
    compute, and of the whole process with all its threads."""

    num_copiers: int
    segment_bytes: int
    num_in_flight: int
    asked_gb_s: float
    num_writes: int
    gb_s: float
    loop_us: float
    process_us: float
    slowest_write_ms: float
    problem: str

    @property
    def share(self) -> float:
        """Of the rate that was asked for."""
        return self.gb_s / self.asked_gb_s


class Writer:
    """The writing side: a transport, a memory of eight segments, and a peer with as much."""

    def __init__(self, options: LoopbackOptions, segment_bytes: int, target: protocol.EngineOpen) -> None:
        """`close` gives all back."""
        self._segment_bytes = segment_bytes
        self._memory = HostMemory.create(_NUM_SLOTS * segment_bytes, "kvxfer-wire")
        self._memory.array[:] = _FILL
        self._address = self._memory.address
        self._transport = LoopbackTransport(options)
        self._transport.register(Region(self._memory.address, self._memory.num_bytes, self._memory.fd))
        self._transport.add_peer(target.peer, target.metadata)
        self._peer = target.peer
        self._region = RegionDescriptor(target.region_id, target.num_bytes)

    def _submit(self, number: int) -> int:
        offset = number % _NUM_SLOTS * self._segment_bytes
        write = ContiguousWrite(self._region, self._address + offset, offset, self._segment_bytes)
        return self._transport.submit_write(self._peer, write)

    def write(self, num_in_flight: int, loop_s: float, seconds: float) -> tuple[int, float, float]:
        """Write for `seconds`; the number of writes, how long they took, and the slowest one.

        Raises `TransportError` where a write fails or none ends.
        """
        began_s = time.perf_counter()
        started: dict[int, float] = {}
        num_writes = 0
        slowest_s = 0.0
        while True:
            may_begin = time.perf_counter() - began_s < seconds
            while may_begin and len(started) < num_in_flight:
                started[self._submit(num_writes)] = time.perf_counter()
                num_writes += 1
            if not started:
                return num_writes, time.perf_counter() - began_s, slowest_s
            if not select.select([self._transport.fileno()], [], [], _WAIT_S)[0]:
                raise TransportError(f"the wire: got no end of {len(started)} writes, expected one in {_WAIT_S:.0f} s")
            for completion in self._transport.poll():
                if completion.outcome is not Outcome.DONE:
                    raise TransportError(f"a write ended as {completion.outcome.value}: {completion.detail}")
                slowest_s = max(slowest_s, time.perf_counter() - started.pop(completion.write_id))
                _compute(loop_s)

    def close(self) -> None:
        self._transport.close()
        self._memory.close()


def _compute(seconds: float) -> None:
    """Hold the interpreter's lock for `seconds` of this thread's processor time."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def measure_wire(
    cast: Cast, num_copiers: int, segment_bytes: int, num_in_flight: int, gb_s: float, loop_s: float, seconds: float
) -> WireResult:
    """The wire with `num_copiers` processes that copy (0: a thread of the writer), after a tenth of the time to warm
    up; every byte is compared afterwards."""
    end = cast.start_worker(f"target-{num_copiers}-{segment_bytes}", "kvxfer.cli.yardstick")
    opened = protocol.OpenEngine(transport="loopback", num_bytes=_NUM_SLOTS * segment_bytes, fill=0)
    target = end.ask(opened, protocol.EngineOpen, _TIMEOUT_S)
    writer = Writer(_options(num_copiers, gb_s), segment_bytes, target)
    try:
        writer.write(num_in_flight, loop_s, max(seconds / 10, 0.05))
        thread_s, process_s = time.thread_time(), time.process_time()
        num_writes, took_s, slowest_s = writer.write(num_in_flight, loop_s, seconds)
        thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
    finally:
        writer.close()
    problem = end.ask(protocol.CheckFill(fill=_FILL), protocol.Verified, _TIMEOUT_S).problem
    return WireResult(
        num_copiers,
        segment_bytes,
        num_in_flight,
        gb_s,
        num_writes,
        num_writes * segment_bytes / took_s / 1e9,
        (thread_s / num_writes - loop_s) * 1e6,
        (process_s / num_writes - loop_s) * 1e6,
        slowest_s * 1e3,
        problem,
    )


def _options(num_copiers: int, gb_s: float) -> LoopbackOptions:
    return LoopbackOptions(wire_bytes_per_s=gb_s * 1e9, num_copy_processes=num_copiers)


def memmove_gb_s(num_threads: int, seconds: float) -> float:
    """What `num_threads` threads copy together, in pieces of 8 MiB, each between memfds of its own."""
    with contextlib.ExitStack() as stack:
        buffers = [[stack.enter_context(_touched_memory()).address for _ in range(2)] for _ in range(num_threads)]
        moved = [0] * num_threads
        until_s = time.perf_counter() + seconds

        def copy(idx: int) -> None:
            src, dst = buffers[idx]
            while time.perf_counter() < until_s:
                first = moved[idx] % (4 * _PART_BYTES)
                ctypes.memmove(dst + first, src + first, _PART_BYTES)
                moved[idx] += _PART_BYTES

        threads = [threading.Thread(target=copy, args=(idx,)) for idx in range(num_threads)]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(moved) / (time.perf_counter() - began_s) / 1e9


def _touched_memory() -> HostMemory:
    memory = HostMemory.create(4 * _PART_BYTES, "kvxfer-memmove")
    memory.array[:] = 1
    return memory


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    num_copiers = int(Wire(1e9, 0.0).options()["num_copy_processes"])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    parser.add_argument("--gb-s", type=float, default=50.0)
    parser.add_argument("--segment-mib", type=_numbers, default=[8])
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--copiers", type=_numbers, default=[num_copiers])
    parser.add_argument("--threads", type=_numbers, default=[1, 4, 8, 12])
    parser.add_argument("--loop-us", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run; 0.5 of each copy by threads alone")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 where a run failed or a byte differs."""
    options = _parse(arguments)
    alone = {count: memmove_gb_s(count, min(0.5, options.seconds)) for count in options.threads}
    runs: list[WireResult] = []
    error = ""
    try:
        with Cast() as cast:
            for segment_mib in options.segment_mib:
                for num_copiers in options.copiers:
                    sizes = (segment_mib * _MIB, options.in_flight, options.gb_s, options.loop_us * 1e-6)
                    runs.append(measure_wire(cast, num_copiers, *sizes, options.seconds))
    except KvxferError as failure:
        error = str(failure)
    if options.json:
        facts = {
            "num_cpus": os.cpu_count(),
            "memmove_gb_s": alone,
            "runs": [asdict(run) | {"share": run.share} for run in runs],
            "error": error,
        }
        print(json.dumps(facts, indent=1))
    else:
        _print(alone, runs, error)
    return 1 if error or any(run.problem for run in runs) else 0


def _print(alone: dict[int, float], runs: list[WireResult], error: str) -> None:
    print(f"{os.cpu_count()} processors; copiers: processes that copy; 0: a thread of the writer")
    print("| threads that only copy | GB/s |\n|---|---|")
    for num_threads, gb_s in alone.items():
        print(f"| {num_threads} | {gb_s:.1f} |")
    print("\n| copiers | MiB | in flight | GB/s asked | GB/s | share | us a write: loop | process | slowest ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run in runs:
        wrong = f" WRONG: {run.problem}" if run.problem else ""
        print(
            f"| {run.num_copiers}{wrong} | {run.segment_bytes // _MIB} | {run.num_in_flight} | {run.asked_gb_s:g} "
            f"| {run.gb_s:.2f} | {run.share:.3f} | {run.loop_us:.0f} | {run.process_us:.0f} "
            f"| {run.slowest_write_ms:.2f} |"
        )
    if error:
        print(f"ended early: {error}")


if __name__ == "__main__":
    sys.exit(main())
