"""Rates of row streams on a GPU, with orders from a process without CUDA: 8 MiB segments of 1152-byte rows, DCP 8.

python -m benchmarks.gpu_stream [--json FILE] [--only idle,busy,device,waits]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stream_agent import MAX_IN_FLIGHT, MAX_SEGMENTS_PER_ORDER, SEGMENT_BYTES, make_offsets, segment_rows
from kvxfer.memory import HostMemory
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.driver import gpu
from kvxfer.streams.ring import Ring

POOL_BYTES = 1 << 30
MAX_UNFINISHED = 256
BASELINE_S = 0.4
cuda: Any = torch.cuda  # not all of it has types


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: `num_entries` entries of `num_segments` segments each, `in_flight` orders open at a time."""

    way: str = "gather"
    busy: str = "none"
    in_flight: int = 8
    num_streams: int = 1
    max_ctas: int = 32
    num_segments: int = 1
    num_entries: int = 400


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    gbs: float
    enqueue_us: float
    agent_cpu_us: float
    worker_share: float | None = None


class Work:
    """Matrix products without pause, in a stream of the worker's: long ones of 4096, short ones of 1024."""

    def __init__(self, busy: str) -> None:
        side, self._num_per_beat = (4096, 1) if busy == "long" else (1024, 16)
        self._values = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._values)
        self._stream = cuda.Stream()
        self._events: deque[Any] = deque()
        self.num_done = 0

    def beat(self) -> None:
        """Launch some; at most 8 beats run ahead."""
        with cuda.stream(self._stream):
            for _ in range(self._num_per_beat):
                torch.mm(self._values, self._values, out=self._out)
            event = cuda.Event()
            event.record()
        self._events.append(event)
        self.num_done += self._num_per_beat
        if len(self._events) > 8:
            self._events.popleft().synchronize()

    def rate(self, is_over: Callable[[], bool], between: Callable[[], None]) -> float:
        """Products a second until `is_over`."""
        self._stream.synchronize()
        first, start_s = self.num_done, time.perf_counter()
        while not is_over():
            self.beat()
            between()
        self._stream.synchronize()
        return (self.num_done - first) / (time.perf_counter() - start_s)


class Bench:
    """The pool, a peer's pool and the slots."""

    def __init__(self) -> None:
        self.pool = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device="cuda")
        self.peer = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device="cuda")
        self.slots = HostMemory.create(MAX_IN_FLIGHT * SEGMENT_BYTES, "bench-slots")
        cuda.synchronize()

    @contextmanager
    def stream(self, case: Case) -> Iterator[tuple[Ring, CudaRowStream]]:
        """A ring and the stream for it."""
        ring = Ring.create(MAX_IN_FLIGHT, 2 * segment_rows(MAX_SEGMENTS_PER_ORDER))
        stream = CudaRowStream(
            ring, DevicePool.of(self.pool), self.slots, max_ctas=case.max_ctas, num_streams=case.num_streams
        )
        stream.set_memory(2, DevicePool.of(self.peer))
        yield ring, stream
        stream.close()
        ring.close()

    def run(self, case: Case) -> Result:
        """Measure a case."""
        with self.stream(case) as (ring, stream):
            work = None if case.busy == "none" else Work(case.busy)
            if work:
                work.rate(_after(0.1), _nothing)
                alone = work.rate(_after(BASELINE_S), _nothing)
            feeder = Feeder(ring, stream, case.num_entries)
            feeder.feed()
            with start_agent(ring, case) as agent:
                if work:
                    work.rate(lambda: ring.is_done(0), feeder.feed)
                    rate = work.rate(lambda: feeder.num_done == case.num_entries, feeder.feed)
                else:
                    while agent.poll() is None:
                        time.sleep(1e-3)
                        feeder.feed()
                assert agent.stdout is not None
                told = json.loads(agent.stdout.read())
            if case.way == "gather":
                self._verify(case)
        num_bytes = case.num_entries * segment_rows(case.num_segments) * 1152
        return Result(
            case,
            gbs=num_bytes / told["taken_s"] / 1e9,
            enqueue_us=feeder.spent_s / case.num_entries * 1e6,
            agent_cpu_us=told["cpu_s"] / case.num_entries * 1e6,
            worker_share=rate / alone if work else None,
        )

    def _verify(self, case: Case) -> None:
        rows = segment_rows(case.num_segments)
        for lane in range(case.in_flight):
            starts = torch.from_numpy(make_offsets(POOL_BYTES, rows, lane)).cuda()
            expected = self.pool[: POOL_BYTES // 1152 * 1152].view(-1, 1152)[starts // 1152]
            got = torch.from_numpy(self.slots.array[lane * SEGMENT_BYTES :][: rows * 1152].copy()).cuda()
            if not torch.equal(got, expected.view(-1)):
                raise SystemExit(f"slot {lane} holds wrong bytes: {case}")


class Feeder:
    """Enqueues what the agent wants, in the worker's own thread, at most `MAX_UNFINISHED` ahead."""

    def __init__(self, ring: Ring, stream: CudaRowStream, num_entries: int) -> None:
        self._ring, self._stream, self._num_entries = ring, stream, num_entries
        self.num_done = self._num_enqueued = 0
        self.spent_s = 0.0

    def feed(self) -> None:
        """Enqueue as many as may be."""
        while self.num_done < self._num_enqueued and self._ring.is_done(self.num_done):
            self.num_done += 1
        end = min(self._num_entries, self.num_done + MAX_UNFINISHED)
        if end - self._num_enqueued < min(32, self._num_entries - self._num_enqueued):
            return
        start_s = time.perf_counter()
        for number in range(self._num_enqueued, end):
            self._stream.enqueue(number)
        self._num_enqueued = end
        self._ring.set_num_enqueued(end)
        self.spent_s += time.perf_counter() - start_s


def start_agent(ring: Ring, case: Case) -> subprocess.Popen[str]:
    """The process that gives the orders."""
    asked = {
        "ring_fd": ring.memory.fd,
        "ring_bytes": ring.memory.num_bytes,
        "num_lanes": ring.num_lanes,
        "pool_bytes": POOL_BYTES,
        **dataclasses.asdict(case),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_stream_agent", json.dumps(asked)],
        cwd=Path(__file__).parents[1],
        pass_fds=(ring.memory.fd,),
        stdout=subprocess.PIPE,
        text=True,
    )


def _nothing() -> None:
    pass


def _after(seconds: float) -> Callable[[], bool]:
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end_s


def time_waits(bench: Bench) -> dict[str, float]:
    """Milliseconds of what a worker may do while its row stream waits for an order, which comes after 500 ms. About 500
    means that it waits for everything on the GPU."""
    small = HostMemory.create(1 << 20, "bench-small")
    values = torch.ones(8, device="cuda", dtype=torch.float64)
    held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    del held
    tries: dict[str, Callable[[], object]] = {
        "allocate": lambda: torch.empty(600 << 20, dtype=torch.uint8, device="cuda"),
        "load a kernel": lambda: torch.hypot(values, values),
        "pin memory": lambda: gpu(0).register(small),
        "unpin memory": lambda: gpu(0).unregister(small),
        "second row stream": lambda: bench.stream(Case()).__enter__()[1].close(),
        "free": cuda.empty_cache,
        "synchronize stream": lambda: cuda.current_stream().synchronize(),
        "synchronize device": cuda.synchronize,
    }
    taken_ms: dict[str, float] = {}
    case = Case(way="skip", num_entries=len(tries))
    ring = Ring.create(1, 16)
    stream = CudaRowStream(ring, DevicePool.of(bench.pool), small.create(4096, "bench-slot"))
    with start_agent(ring, case):
        for number, (name, call) in enumerate(tries.items()):
            stream.enqueue(number)
            ring.set_num_enqueued(number + 1)
            start_s = time.perf_counter()
            call()
            taken_ms[name] = (time.perf_counter() - start_s) * 1e3
            while not ring.is_done(number):
                time.sleep(1e-3)
    stream.close()
    ring.close()
    return taken_ms


def cases(only: set[str]) -> list[Case]:
    """What to measure, of `idle`, `busy` and `device`."""
    found: list[Case] = []
    if "idle" in only:
        found += [Case(in_flight=n, num_streams=m) for m in (1, 2) for n in (1, 4, 8)]
        found += [Case(max_ctas=n) for n in (8, 16, 64)]
        found += [Case(way="scatter"), Case(way="scatter", num_streams=2)]
    if "busy" in only:
        found += [
            Case(busy=busy, num_streams=m, max_ctas=n, num_entries=3000)
            for busy in ("long", "short")
            for m, n in ((1, 16), (1, 32), (2, 16), (2, 32))
        ]
    if "device" in only:
        for num_segments, max_ctas in ((1, 32), (1, 128), (8, 32), (8, 128), (8, 512)):
            found.append(Case(way="pull", max_ctas=max_ctas, num_segments=num_segments))
    return found


def main() -> None:
    """Print a table; with --json also write everything there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="idle,busy,device,waits")
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    bench = Bench()
    print("way      busy   in flight  streams  ctas  MiB/entry  GB/s    us/enqueue  agent CPU us  worker keeps")
    results = []
    for case in cases(only):
        result = bench.run(case)
        results.append(result)
        share = "" if result.worker_share is None else f"{result.worker_share:.3f}"
        print(
            f"{case.way:8} {case.busy:6} {case.in_flight:9}  {case.num_streams:7}  {case.max_ctas:4}  "
            f"{case.num_segments * 8:9}  {result.gbs:6.1f}  {result.enqueue_us:10.1f}  {result.agent_cpu_us:12.1f}  "
            f"{share}",
            flush=True,
        )
    waits = time_waits(bench) if "waits" in only else {}
    for name, milliseconds in waits.items():
        print(f"beside a stream that waits 500 ms for its order: {name} {milliseconds:.1f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cases": [dataclasses.asdict(each) for each in results], "waits": waits}))


if __name__ == "__main__":
    main()
