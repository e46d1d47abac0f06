"""The agent's part of `benchmarks.gpu_stream`: gives orders and watches done words, in a process without CUDA."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import numpy.typing as npt

from kvxfer.streams.ring import LINEAR, OrderCode, Ring, Span

ROW_BYTES, PAGE_ROWS, ROW_STEP = 1152, 64, 8  # a rank of DCP 8 owns every eighth row
SEGMENT_BYTES = 8 << 20
MAX_IN_FLIGHT = 8
MAX_SEGMENTS_PER_ORDER = 8
_NAP_S = 20e-6


def segment_rows(num_segments: int) -> int:
    """Rows that fill so many segments."""
    return num_segments * SEGMENT_BYTES // ROW_BYTES


def make_offsets(pool_bytes: int, num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """`[num_rows]` int64: every eighth row of shuffled pages."""
    page_bytes = PAGE_ROWS * ROW_BYTES
    pages = np.random.default_rng(seed).permutation(pool_bytes // page_bytes)[: -(-num_rows * ROW_STEP // PAGE_ROWS)]
    rows = pages[:, None] * page_bytes + np.arange(0, page_bytes, ROW_BYTES * ROW_STEP)
    return rows.reshape(-1)[:num_rows].astype(np.int64)


def make_span(direction: str, num_rows: int, slot_first_byte: int) -> Span:
    """`gather` from the pool into a slot, `scatter` back, or `pull` from a peer's pool (memory 2) into the pool."""
    if direction == "gather":
        return Span(ROW_BYTES, num_rows, 16, 0, 0, 0, 1, slot_first_byte, LINEAR)
    if direction == "scatter":
        return Span(ROW_BYTES, num_rows, 16, 1, slot_first_byte, LINEAR, 0, 0, 0)
    return Span(ROW_BYTES, num_rows, 16, 2, 0, 0, 0, 0, num_rows)


def give_orders(ring: Ring, pool_bytes: int, num_entries: int, in_flight: int, num_segments: int, way: str) -> float:
    """Keep `in_flight` orders open until `num_entries` are done; the seconds that took."""
    num_rows = segment_rows(num_segments)
    tables = [make_offsets(pool_bytes, num_rows, lane) for lane in range(in_flight + 1)]
    if way == "pull":
        tables = [np.concatenate(tables[lane : lane + 2]) for lane in range(in_flight)]
    open_entries: dict[int, int] = {}
    idle_lanes = list(range(in_flight))
    num_given = num_done = 0
    while ring.num_enqueued < min(in_flight, num_entries):
        time.sleep(_NAP_S)
    start_s = time.perf_counter()
    while num_done < num_entries:
        for number in [number for number in open_entries if ring.is_done(number)]:
            idle_lanes.append(open_entries.pop(number))
            num_done += 1
        while idle_lanes and num_given < min(num_entries, ring.num_enqueued):
            lane = idle_lanes.pop()
            ring.fill_lane(lane, [make_span(way, num_rows, lane * SEGMENT_BYTES)], tables[lane])
            ring.order(num_given, OrderCode.RUN, lane)
            open_entries[num_given] = lane
            num_given += 1
        time.sleep(_NAP_S)
    return time.perf_counter() - start_s


def skip_late(ring: Ring, num_entries: int, late_s: float) -> None:
    """Skip each of `num_entries` entries `late_s` after it was enqueued."""
    for number in range(num_entries):
        while ring.num_enqueued <= number:
            time.sleep(1e-3)
        time.sleep(late_s)
        ring.order(number, OrderCode.SKIP)


def main() -> None:
    """Arguments: one JSON object, as `benchmarks.gpu_stream` writes it. Prints the seconds."""
    asked = json.loads(sys.argv[1])
    ring = Ring.attach(asked["ring_fd"], asked["ring_bytes"], asked["num_lanes"])
    if asked["way"] == "skip":
        skip_late(ring, asked["num_entries"], 0.5)
        taken_s = 0.0
    else:
        arguments = (asked[name] for name in ("pool_bytes", "num_entries", "in_flight", "num_segments", "way"))
        taken_s = give_orders(ring, *arguments)
    print(json.dumps({"taken_s": taken_s, "cpu_s": time.process_time()}))
    ring.close()


if __name__ == "__main__":
    main()
