"""Rates of row streams on a GPU, with orders from a process without CUDA: 8 MiB segments of 1152-byte rows, DCP 8.

python -m benchmarks.gpu_stream [--json FILE] [--only idle,busy,bound,device,verify,waits]

All in about 40 s, besides the start of CUDA and, once, the compilation of the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stream_agent import (
    CHUNK_ROWS,
    MAX_IN_FLIGHT,
    ROW_BYTES,
    SEGMENT_BYTES,
    Agent,
    Task,
    make_offsets,
    segment_rows,
)
from benchmarks.gpu_stream_waits import held_streams, time_waits
from benchmarks.needs_gpus import check_gpus
from kvxfer.memory import HostMemory
from kvxfer.row_sums import row_sum
from kvxfer.streams.cuda_stream import (
    GATHER_CTAS,
    NUM_STREAMS,
    PULL_CTAS,
    SCATTER_CTAS,
    STAGED_CTAS,
    STREAM_PRIORITY,
    CudaRowStream,
)
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import Ring
from kvxfer.streams.slot_binding import offer_slots

POOL_BYTES = 1 << 30
PARTS = ("idle", "busy", "bound", "device", "verify", "waits")
MAX_UNFINISHED = 128
BASELINE_S = 0.4
cuda: Any = torch.cuda  # not all of it has types


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: `num_entries` entries of `num_segments` segments each, `in_flight` orders open at a time.

    With `staged_ctas` gathers are summed, and scatters checked and then moved by so many programs. With `is_bound` so
    many pack a segment, which a copy engine takes to the slot that the entry is bound to; nothing is summed.
    """

    way: str
    max_ctas: int
    busy: str = "none"
    in_flight: int = MAX_IN_FLIGHT
    num_streams: int = NUM_STREAMS
    priority: int = STREAM_PRIORITY
    num_segments: int = 1
    num_entries: int = 400
    staged_ctas: int = 0
    is_bound: bool = False


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
        self._num_done = 0
        self.rate(_after(0.1), _nothing)
        self.rate_alone = self.rate(_after(BASELINE_S), _nothing)

    def _beat(self) -> None:
        """Launch some; at most 8 beats run ahead."""
        with cuda.stream(self._stream):
            for _ in range(self._num_per_beat):
                torch.mm(self._values, self._values, out=self._out)
            event = cuda.Event()
            event.record()
        self._events.append(event)
        self._num_done += self._num_per_beat
        if len(self._events) > 8:
            self._events.popleft().synchronize()

    def rate(self, is_over: Callable[[], bool], between: Callable[[], None]) -> float:
        """Products a second until `is_over`."""
        self._stream.synchronize()
        first, start_s = self._num_done, time.perf_counter()
        while not is_over():
            self._beat()
            between()
        self._stream.synchronize()
        return (self._num_done - first) / (time.perf_counter() - start_s)


class Bench:
    """The pool, a peer's pool, the slots and the agent. Close `agent` after it."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.pool = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device="cuda")
        self.peer = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device="cuda")
        self.slots = HostMemory.create(MAX_IN_FLIGHT * SEGMENT_BYTES, "bench-slots")
        self._works: dict[str, Work | None] = {"none": None}
        cuda.synchronize()

    @contextmanager
    def stream(self, case: Case) -> Iterator[tuple[Ring, CudaRowStream]]:
        """A ring and the stream for it."""
        staging_bytes = SEGMENT_BYTES if case.staged_ctas and case.way == "scatter" else 0
        ring = Ring.create(MAX_IN_FLIGHT, 2 * CHUNK_ROWS, staging_bytes)
        if case.is_bound:
            offer_slots(ring, MAX_IN_FLIGHT, SEGMENT_BYTES)
        stream = CudaRowStream(
            ring,
            DevicePool.of(self.pool),
            self.slots,
            max_ctas=case.max_ctas,
            pull_ctas=case.max_ctas,
            num_streams=case.num_streams,
            staged_ctas=case.staged_ctas or STAGED_CTAS,
            priority=case.priority,
            may_bind=case.is_bound,
        )
        if case.way == "pull":
            stream.set_memory(2, DevicePool.of(self.peer))
        yield ring, stream
        stream.close()
        ring.close()

    def run(self, case: Case) -> Result:
        """Measure a case."""
        if case.busy not in self._works:
            self._works[case.busy] = Work(case.busy)
        work = self._works[case.busy]
        if case.way == "scatter":
            self._fill_slots()
        # Before a stream waits, and torch loads no kernel any more.
        sums = self._sums() if case.staged_ctas and not case.is_bound else ()
        with self.stream(case) as (ring, stream):
            feeder = Feeder(ring, stream, case.num_entries)
            feeder.feed()
            task = Task(
                case.way, case.num_entries, case.in_flight, case.num_segments, sums=sums, is_bound=case.is_bound
            )
            self.agent.start(ring, task)
            told = None
            if work:
                work.rate(lambda: ring.is_done(0), feeder.feed)
                rate = work.rate(lambda: feeder.num_done == case.num_entries, feeder.feed)
            while told is None:
                told = self.agent.told(1e-3)
                feeder.feed()
            if case.way == "gather":
                self._verify(case)
        num_bytes = case.num_entries * segment_rows(case.num_segments) * ROW_BYTES
        return Result(
            case,
            gbs=num_bytes / told.taken_s / 1e9,
            enqueue_us=feeder.spent_s / case.num_entries * 1e6,
            agent_cpu_us=told.cpu_s / case.num_entries * 1e6,
            worker_share=rate / work.rate_alone if work else None,
        )

    def _rows(self, lane: int, num_rows: int) -> torch.Tensor:
        """`[num_rows, ROW_BYTES]` uint8: what a gather puts into slot `lane`."""
        starts = torch.from_numpy(make_offsets(num_rows, lane)).cuda()
        return self.pool[: POOL_BYTES // ROW_BYTES * ROW_BYTES].view(-1, ROW_BYTES)[starts // ROW_BYTES]

    def _fill_slots(self) -> None:
        """So that scatters leave the pool as it is, and no row the wrong sum."""
        num_rows = segment_rows(1)
        for lane in range(MAX_IN_FLIGHT):
            packed = self._rows(lane, num_rows).cpu().numpy().reshape(-1)
            self.slots.array[lane * SEGMENT_BYTES :][: packed.size] = packed

    @functools.cache  # noqa: B019 - one bench a process
    def _sums(self) -> tuple[int, ...]:
        num_rows = segment_rows(1)
        return tuple(row_sum(self._rows(lane, num_rows).cpu().numpy().reshape(-1)) for lane in range(MAX_IN_FLIGHT))

    def _verify(self, case: Case) -> None:
        rows = segment_rows(case.num_segments)
        for lane in range(case.in_flight):
            expected = self._rows(lane, rows)
            got = torch.from_numpy(self.slots.array[lane * SEGMENT_BYTES :][: rows * ROW_BYTES].copy()).cuda()
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


def _nothing() -> None:
    pass


def _after(seconds: float) -> Callable[[], bool]:
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end_s


def cases(only: set[str]) -> list[Case]:
    """What to measure, of `idle`, `busy`, `bound`, `device` and `verify`."""
    found: list[Case] = []
    if "idle" in only:
        found += [Case("gather", num_ctas) for num_ctas in (2, 4, 6, 8, 16)]
        found += [Case("gather", GATHER_CTAS, num_streams=1), Case("gather", GATHER_CTAS, in_flight=1)]
        found += [Case("scatter", num_ctas) for num_ctas in (4, 8, 12, 16)]
        found += [Case("scatter", SCATTER_CTAS, num_streams=1), Case("scatter", SCATTER_CTAS, in_flight=1)]
    if "busy" in only:
        for busy in ("long", "short"):
            base = Case("gather", GATHER_CTAS, busy, num_entries=1200)
            for case in base, dataclasses.replace(base, way="scatter", max_ctas=SCATTER_CTAS):
                found += [case, dataclasses.replace(case, priority=0), dataclasses.replace(case, num_streams=1)]
            found.append(dataclasses.replace(base, max_ctas=2))
    for busy in ("none", "long", "short"):
        if "bound" in only:
            base = Case("gather", GATHER_CTAS, busy, num_entries=1200, is_bound=True)
            found += [dataclasses.replace(base, staged_ctas=each) for each in (24, STAGED_CTAS, 96, 132, 264)]
    if "device" in only:
        for num_segments, num_ctas in ((1, PULL_CTAS), (8, PULL_CTAS), (8, 132), (8, 264)):
            found.append(Case("pull", num_ctas, num_segments=num_segments, num_entries=200))
    if "verify" in only:
        for num_ctas in (GATHER_CTAS, 6, 8):
            found += [Case("gather", num_ctas, staged_ctas=each) for each in (0, STAGED_CTAS)]
        found += [Case("gather", GATHER_CTAS, num_streams=1, staged_ctas=each) for each in (0, STAGED_CTAS)]
        for num_ctas in (SCATTER_CTAS, 12, 16):
            found += [Case("scatter", num_ctas, staged_ctas=each) for each in (0, STAGED_CTAS)]
        found += [Case("scatter", SCATTER_CTAS, staged_ctas=each) for each in (24, 96)]
        found += [Case("scatter", SCATTER_CTAS, num_streams=1, staged_ctas=each) for each in (0, STAGED_CTAS, 96)]
        for busy in ("long", "short"):
            base = Case("scatter", SCATTER_CTAS, busy, num_entries=1200, staged_ctas=STAGED_CTAS)
            found += [base, dataclasses.replace(base, way="gather", max_ctas=GATHER_CTAS)]
    return found


def print_result(result: Result) -> None:
    """One line of the table."""
    case = result.case
    way = "bound" if case.is_bound else case.way
    share = "" if result.worker_share is None else f"{result.worker_share:.3f}"
    told = (
        f"{way:8} {case.busy:6} {case.in_flight:9} {case.num_streams:7}  {case.priority:8}  {case.max_ctas:4}  "
        f"{case.staged_ctas or '-':>6}  "
    )
    told += f"{case.num_segments * 8:9}  {result.gbs:6.1f}  {result.enqueue_us:10.1f}  {result.agent_cpu_us:8.1f}  "
    print(told + share, flush=True)


def main() -> None:
    """Print a table; with --json also write everything there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="some of these parts")
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    if not only <= set(PARTS):
        parser.error(f"--only: got {arguments.only}, expected some of {', '.join(PARTS)}")
    check_gpus(parser, 1)
    waits: dict[str, float] = {}
    held: dict[int, int] = {}
    with Agent() as agent:
        bench = Bench(agent)
        began_s = time.perf_counter()
        print("way      busy   in-flight streams  priority  ctas  staged  MiB/entry  GB/s    enqueue us  agent us")
        results = []
        for case in cases(only):
            results.append(bench.run(case))
            print_result(results[-1])
        if "waits" in only:
            held = held_streams(bench.pool)
            waits = time_waits(bench.pool, agent)
    for priority, num_streams in held.items():
        print(f"a stream of priority {priority} that waits holds up {num_streams} of the worker's")
    for name, milliseconds in waits.items():
        print(f"beside a stream that waits for its order: {name} {milliseconds:.1f} ms")
    print(f"{time.perf_counter() - began_s:.0f} s in all")
    if arguments.json:
        measured = {"cases": [dataclasses.asdict(each) for each in results], "held": held, "waits": waits}
        arguments.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
