"""What one descriptor a row costs between two processes on a GPU, beside one descriptor a slot: NIXL over UCX.

`python -m benchmarks.gpu_nixl [--rows N] [--slots N] [--repeat N] [--target-gpu N] [--json FILE] [--quick]`

Both go through the transport that agents use, out of memory that the writing process allocated, as agents allocate
slots on a GPU: rows of 1152 bytes, eight apart as a rank of DCP 8 owns them, and slots of 8 MiB, up to eight at a time.
Beside them stands what UCX does with other memory: such as `allocate_pool` makes, and such as another process has
allocated. With `--target-gpu` both go from GPU 0 to another one, and other memory is left out. `--quick` tries the
command on memory of the host.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu_peer import Entries, Kind, Peer, PeerError, digest, packed, random_bytes
from kvxfer.errors import TransportError
from kvxfer.slot_memory import PROBE_BYTES
from kvxfer.streams.device import MappedPool, allocate_pool
from kvxfer.streams.driver import gpu
from kvxfer.streams.legacy import allocate_legacy

ROW_BYTES, ROW_STEP = 1152, 8
NUM_SLOTS, SLOT_BYTES = 8, 8 << 20
GOAL = 1000.0


@dataclass(frozen=True, slots=True)
class Result:
    """One way of writing. `problem` is empty where every write was done and every byte is right."""

    name: str
    descriptor_bytes: int
    num_descriptors: int
    gb_s: float
    path: str
    problem: str


def rows(num_rows: int) -> Entries:
    """Every eighth row of the source, into a dense run of the target; neighbours swapped, so that no engine merges
    them."""
    order = np.arange(num_rows).reshape(-1, 2)[:, ::-1].ravel().tolist()
    return [[row * ROW_STEP * ROW_BYTES, row * ROW_BYTES, ROW_BYTES] for row in order]


def slots(num_writes: int, slot_bytes: int) -> list[Entries]:
    """Whole slots, one a write."""
    firsts = [number % NUM_SLOTS * slot_bytes for number in range(num_writes)]
    return [[[first, first, slot_bytes]] for first in firsts]


def measure(name: str, writer: Peer, target: Peer, writes: list[Entries], repeats: int, num_bytes: int) -> Result:
    """Write, then compare every byte of the target."""
    descriptors = [entry for entries in writes for entry in entries]
    size = descriptors[0][2]
    try:
        writer.call("fill", seed=1)
        target.call("fill", seed=2)
        writer.knows(target)
        writer.write(target, writes, NUM_SLOTS)  # the first one opens the path
        written = writer.write(target, writes, NUM_SLOTS, repeats)
        problem = written.detail
        expected, source = random_bytes(2, num_bytes), random_bytes(1, num_bytes)
        for src, dst, length in descriptors:
            expected[dst : dst + length] = source[src : src + length]
        if not problem and target.call("digest") != digest(expected):
            problem = "bytes differ"
    except PeerError as error:
        return Result(name, size, len(descriptors), 0.0, "", str(error))
    gb_s = sum(entry[2] for entry in descriptors) / written.seconds / 1e9
    return Result(name, size, len(descriptors), gb_s, written.path, problem)


def run(num_rows: int, num_writes: int, repeats: int, kind: Kind, slot_bytes: int, target_gpu: int = 0) -> list[Result]:
    """Both ways between memories as agents have them."""
    num_bytes = NUM_SLOTS * slot_bytes + PROBE_BYTES
    with ExitStack() as stack:
        writer = stack.enter_context(Peer("nixl", kind, NUM_SLOTS, slot_bytes))
        target = stack.enter_context(Peer("nixl", kind, NUM_SLOTS, slot_bytes, gpu_index=target_gpu))
        return [
            measure("one descriptor a row", writer, target, [rows(num_rows)], repeats, num_bytes),
            measure("one descriptor a slot", writer, target, slots(num_writes, slot_bytes), repeats, num_bytes),
        ]


def run_other_memory(num_writes: int, repeats: int) -> list[Result]:
    """Slots of 8 MiB out of, or into, other memory of the GPU than agents allocate."""
    num_bytes = NUM_SLOTS * SLOT_BYTES
    writes = slots(num_writes, SLOT_BYTES)
    legacy, vmm = allocate_legacy(num_bytes, 0), allocate_pool(num_bytes, 0)
    ways: list[tuple[str, Kind, Kind, MappedPool | None]] = [
        ("out of memory of allocate_pool into such", "vmm", "vmm", None),
        ("out of a pool mapped by its legacy handle", "imported", "device", legacy),
        ("out of a pool mapped by its descriptor", "imported", "device", vmm),
    ]
    results = []
    for name, src, dst, pool in ways:
        handle, fd = ("", -1) if pool is None else (packed(pool.handle), pool.fd)
        with ExitStack() as stack:
            writer = stack.enter_context(Peer("nixl", src, NUM_SLOTS, SLOT_BYTES, handle=handle, fd=fd))
            target = stack.enter_context(Peer("nixl", dst, NUM_SLOTS, SLOT_BYTES))
            dst_bytes = num_bytes + (PROBE_BYTES if dst == "device" else 0)
            results.append(measure(name, writer, target, writes, repeats, dst_bytes))
    for each in (legacy, vmm):
        each.close()
    return results


def main() -> int:
    """Run the command; 1 where a byte differs or agents' memory cannot be used."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=7168, help="rows in one write, at most 7281")
    parser.add_argument("--slots", type=int, default=64, help="slots written in one repeat")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--target-gpu", type=int, default=0, help="GPU of the process that is written to")
    parser.add_argument("--json", type=Path, help="write all results into this file")
    parser.add_argument("--quick", action="store_true", help="memory of the host, few rows, small slots")
    options = parser.parse_args()
    others: list[Result] = []
    if options.quick:
        main_results = run(64, NUM_SLOTS, 1, "host", 256 << 10)
    else:
        try:
            gpu(options.target_gpu)
        except TransportError as error:
            parser.error(f"{error}; or try --quick")
        target_gpu: int = options.target_gpu
        main_results = run(options.rows, options.slots, options.repeat, "device", SLOT_BYTES, target_gpu)
        if target_gpu == 0:
            others = run_other_memory(options.slots // 4, 2)
    results = [*main_results, *others]
    _say("| writes | descriptor | descriptors | GB/s | path | |\n|---|---|---|---|---|---|")
    for result in results:
        _say(
            f"| {result.name} | {result.descriptor_bytes} | {result.num_descriptors} | {result.gb_s:.2f} "
            f"| {result.path} | {result.problem} |"
        )
    raw, packed = main_results
    if raw.gb_s:
        _say(f"\nslots / rows: {packed.gb_s / raw.gb_s:.0f} times (goal on a GPU: at least {GOAL:.0f})")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    return int(any(result.problem for result in main_results))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
