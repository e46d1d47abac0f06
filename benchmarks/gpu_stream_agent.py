"""The agent's part of `benchmarks.gpu_stream`: gives orders and watches done words, in a process without CUDA."""

from __future__ import annotations

import dataclasses
import functools
import json
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvxfer.streams.ring import LINEAR, NO_SUM, MemoryIndex, OrderCode, Ring, Span, SumKind, SumOrder

ROW_BYTES, PAGE_ROWS, ROW_STEP = 1152, 64, 8  # a rank of DCP 8 owns every eighth row
CHUNK_ROWS = 1024  # of a chunk of 8192 tokens
_LAYER_BYTES = CHUNK_ROWS * ROW_STEP * ROW_BYTES
SEGMENT_BYTES = 8 << 20
MAX_IN_FLIGHT = 8
_NAP_S = 20e-6
_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """`num_entries` orders of `num_segments` segments each, `in_flight` open at a time. `way`: `gather`, `scatter`,
    `pull`, or `skip`, which comes `late_s` after the entry. With `sums`, one for each lane, gathers are summed and
    scatters checked; each entry must find its own. Entries that are bound to slots have lanes of the same numbers.
    """

    way: str
    num_entries: int
    in_flight: int = 1
    num_segments: int = 1
    late_s: float = 0.0
    sums: tuple[int, ...] = ()
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """From the first order to the end of the last entry, and the processor time of all threads in between."""

    taken_s: float
    cpu_s: float


class Agent:
    """The process, for one task after another: its start would take longer than most of them."""

    def __init__(self) -> None:
        """Start it."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_stream_agent", str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                pass_fds=(theirs.fileno(),),
            )

    def start(self, ring: Ring, task: Task) -> None:
        """Let it give orders to the stream of `ring`, as the only one."""
        message = [ring.memory.num_bytes, ring.num_lanes, dataclasses.asdict(task)]
        socket.send_fds(self._socket, [json.dumps(message).encode()], [ring.memory.fd])

    def told(self, timeout_s: float) -> Told | None:
        """What came of the task; None while it goes on after `timeout_s`."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        message = self._socket.recv(_MESSAGE_BYTES)
        if not message:
            raise SystemExit("the agent's process has ended: see above")
        return Told(**json.loads(message))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()


def segment_rows(num_segments: int) -> int:
    """Rows that fill so many segments."""
    return num_segments * SEGMENT_BYTES // ROW_BYTES


@functools.cache
def make_table(seed: int) -> npt.NDArray[np.int64]:
    """`[CHUNK_ROWS]` int64: the rows of a chunk in its layer, every eighth row of shuffled pages."""
    page_bytes = PAGE_ROWS * ROW_BYTES
    pages = np.random.default_rng(seed).permutation(_LAYER_BYTES // page_bytes)
    rows = pages[:, None] * page_bytes + np.arange(0, page_bytes, ROW_BYTES * ROW_STEP)
    return rows.reshape(-1).astype(np.int64)


def make_offsets(num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """`[num_rows]` int64: where rows lie that begin with the first of a chunk's first layer, layer by layer."""
    layer, row = np.divmod(np.arange(num_rows), CHUNK_ROWS)
    offsets: npt.NDArray[np.int64] = layer * _LAYER_BYTES + make_table(seed)[row]
    return offsets


def make_spans(task: Task, slot_memory: int, slot_first_byte: int) -> list[Span]:
    """A span a layer. `gather` from the pool into a slot, `scatter` back, or `pull` from a peer's pool (memory 2) into
    the pool, which has the second table."""
    spans = []
    num_rows = segment_rows(task.num_segments)
    for first_row in range(0, num_rows, CHUNK_ROWS):
        rows = min(CHUNK_ROWS, num_rows - first_row)
        in_pool = first_row // CHUNK_ROWS * _LAYER_BYTES
        in_slot = slot_first_byte + first_row * ROW_BYTES
        if task.way == "gather":
            places = (0, in_pool, 0, slot_memory, in_slot, LINEAR)
        elif task.way == "scatter":
            places = (slot_memory, in_slot, LINEAR, 0, in_pool, 0)
        else:
            places = (2, in_pool, 0, 0, in_pool, CHUNK_ROWS)
        spans.append(Span(ROW_BYTES, rows, 16, *places))
    return spans


def fill_lane(ring: Ring, task: Task, lane: int, offsets: npt.NDArray[np.int64]) -> None:
    """What the order with this lane says; the slot has its number."""
    first_byte = lane * SEGMENT_BYTES
    memory, in_memory, summed = MemoryIndex.SLOTS, first_byte, NO_SUM
    if task.sums and task.way == "gather":
        summed = SumOrder(SumKind.MOVED, first_byte)
    elif task.sums:
        num_bytes = segment_rows(task.num_segments) * ROW_BYTES
        summed = SumOrder(SumKind.CHECKED, first_byte, num_bytes, task.sums[lane])
    if task.is_bound or summed.kind is SumKind.CHECKED:
        memory, in_memory = MemoryIndex.STAGING, 0
    ring.fill_lane(lane, make_spans(task, memory, in_memory), offsets, summed)


def give_orders(ring: Ring, task: Task) -> Told:
    """Keep orders open until all entries are done. Slots and lanes go by the same number."""
    tables = [make_table(lane) for lane in range(task.in_flight + 1)]
    if task.way == "pull":
        tables = [np.concatenate(tables[lane : lane + 2]) for lane in range(task.in_flight)]
    open_entries: dict[int, int] = {}
    idle_lanes = list(range(task.in_flight))
    num_given = num_done = 0
    while ring.num_enqueued < min(task.in_flight, task.num_entries):
        time.sleep(_NAP_S)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    while num_done < task.num_entries:
        for number in [number for number in open_entries if ring.is_done(number)]:
            lane = open_entries.pop(number)
            if task.sums and ring.sum_of(number) != task.sums[lane]:
                raise SystemExit(f"entry {number}: got sum {ring.sum_of(number):#x}, expected {task.sums[lane]:#x}")
            idle_lanes.append(lane)
            num_done += 1
        while idle_lanes and num_given < min(task.num_entries, ring.num_enqueued):
            lane = num_given % task.in_flight if task.is_bound else idle_lanes[-1]
            if lane not in idle_lanes:
                break
            idle_lanes.remove(lane)
            fill_lane(ring, task, lane, tables[lane])
            ring.order(num_given, OrderCode.RUN, lane)
            open_entries[num_given] = lane
            num_given += 1
        time.sleep(_NAP_S)
    return Told(time.perf_counter() - start_s, time.process_time() - start_cpu_s)


def skip_late(ring: Ring, task: Task) -> Told:
    """Skip each entry some time after it was enqueued."""
    for number in range(task.num_entries):
        while ring.num_enqueued <= number:
            time.sleep(1e-3)
        time.sleep(task.late_s)
        ring.order(number, OrderCode.SKIP)
    return Told(0.0, 0.0)


def main() -> None:
    """Argument: the descriptor of a socket to `Agent`. Works until that hangs up."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while True:
            message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
            if not message:
                return
            num_bytes, num_lanes, fields = json.loads(message)
            task = Task(**{**fields, "sums": tuple(fields["sums"])})
            ring = Ring.attach(fds[0], num_bytes, num_lanes)
            told = skip_late(ring, task) if task.way == "skip" else give_orders(ring, task)
            ring.close()
            connection.send(json.dumps(dataclasses.asdict(told)).encode())


if __name__ == "__main__":
    main()
