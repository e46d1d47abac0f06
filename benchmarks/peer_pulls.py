"""What a row stream reaches that pulls out of a pool on another GPU, by how many programs move the rows.

`python -m benchmarks.peer_pulls [--owner N] [--json FILE] [--quick]`

Rows of 1152 bytes in 61 layers, half a GB an order as a decode rank gets it: all rows of shuffled pages of 64 (DCP 1),
or every eighth (DCP 8), into shuffled pages on GPU 0. Four orders at once; no agent, so nothing but the stream is
timed. Beside it stands what torch copies from that GPU. `--quick` tries the command on memory of the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_copies import copied_gbs
from benchmarks.needs_gpus import QUICK, check_gpus
from kvxfer.memory import HostMemory
from kvxfer.ownership import Int64Array
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import DevicePool, allocate_pool, map_pool
from kvxfer.streams.host_stream import HostRowStream
from kvxfer.streams.ring import MemoryIndex, OrderCode, Ring, Span
from kvxfer.streams.row_stream import RowStream

ROW_BYTES, PAGE_TOKENS, NUM_ORDERS, NUM_REPEATS = 1152, 64, 4, 3
DCP_SIZES = (1, 8)
STREAMS = (1, 2)
CTAS = (8, 16, 24, 32, 48, 64, 96, 132, 264)
_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What an order moves."""

    num_layers: int
    num_pages: int  # of the target

    @property
    def num_rows(self) -> int:
        return self.num_pages * PAGE_TOKENS

    @property
    def layer_bytes(self) -> int:
        """Of the target; of the source, as many times that as there are ranks."""
        return self.num_rows * ROW_BYTES

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Result:
    dcp: int
    num_streams: int
    num_ctas: int
    gb_s: float


def offsets_of(shape: Shape, dcp: int) -> tuple[Int64Array, Int64Array]:
    """`[num_rows]` each: where the rows of a layer begin in the source, and in the target."""
    found = []
    for seed, step in enumerate((dcp, 1)):
        tokens = np.arange(shape.num_rows, dtype=np.int64) * step
        pages = np.random.default_rng(seed).permutation(shape.num_pages * step)
        found.append((pages[tokens // PAGE_TOKENS] * PAGE_TOKENS + tokens % PAGE_TOKENS) * ROW_BYTES)
    return found[0], found[1]


def spans_of(shape: Shape, dcp: int) -> list[Span]:
    """A span a layer; all share two tables."""
    rows, peer = shape.num_rows, MemoryIndex.FIRST_PEER
    return [
        Span(
            *(ROW_BYTES, rows, 16),
            *(peer, layer * shape.layer_bytes * dcp, 0),
            *(MemoryIndex.POOL, layer * shape.layer_bytes, rows),
        )
        for layer in range(shape.num_layers)
    ]


class Pools:
    """The source, of which ranks of up to `DCP_SIZES` own rows, and the target; on two GPUs, or on the host."""

    def __init__(self, shape: Shape, owner: int | None) -> None:
        """`owner`: the GPU of the source; that of the target is 0. None: both on the host."""
        self.shape = shape
        self._is_on_gpus = owner is not None
        src_bytes = shape.num_bytes * max(DCP_SIZES)
        if owner is None:
            host = HostMemory.create(src_bytes, "source"), HostMemory.create(shape.num_bytes, "target")
            self._host = host
            self.source, self.target = (torch.from_numpy(memory.array) for memory in host)
        else:
            shared = allocate_pool(src_bytes, owner)
            self._peer = map_pool(shared.handle, shared.fd, is_read_only=True, device_index=0).pool
            self.source = shared.tensor()
            self.target = torch.zeros(shape.num_bytes, dtype=torch.uint8, device="cuda:0")
        self.source.view(torch.int64).random_()
        _settle(self.source)

    @contextmanager
    def stream(self, ring: Ring, num_ctas: int, num_streams: int) -> Iterator[RowStream]:
        """A stream that pulls with so many programs an order."""
        with HostMemory.create(4096, "slots") as slots:
            stream: RowStream
            if self._is_on_gpus:
                pool = DevicePool.of(self.target)
                stream = CudaRowStream(ring, pool, slots, pull_ctas=num_ctas, num_streams=num_streams)
                stream.set_memory(MemoryIndex.FIRST_PEER, self._peer)
            else:
                stream = HostRowStream(ring, self._host[1], slots)
                stream.set_memory(MemoryIndex.FIRST_PEER, self._host[0])
            yield stream
            stream.close()

    def check(self, dcp: int) -> None:
        """Every row of the first and the last layer is where it belongs. Raises `SystemExit`."""
        src, dst = (torch.from_numpy(each // ROW_BYTES) for each in offsets_of(self.shape, dcp))
        for layer in (0, self.shape.num_layers - 1):
            theirs, ours = (
                pool[layer * layer_bytes :][:layer_bytes].view(-1, ROW_BYTES)
                for pool, layer_bytes in (
                    (self.source, self.shape.layer_bytes * dcp),
                    (self.target, self.shape.layer_bytes),
                )
            )
            if not torch.equal(theirs[src.to(theirs.device)].to(ours.device), ours[dst.to(ours.device)]):
                raise SystemExit(f"DCP {dcp}, layer {layer}: got wrong rows")


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def measure(pools: Pools, dcp: int, num_streams: int, num_ctas: int) -> Result:
    """The median over a few rounds of `NUM_ORDERS` orders given at once; every one of them moves the same rows."""
    shape = pools.shape
    ring = Ring.create(NUM_ORDERS, 2 * shape.num_rows)
    offsets = np.concatenate(offsets_of(shape, dcp))
    for lane in range(NUM_ORDERS):
        ring.fill_lane(lane, spans_of(shape, dcp), offsets)
    taken_s = []
    with pools.stream(ring, num_ctas, num_streams) as stream:
        for first in range(0, (1 + NUM_REPEATS) * NUM_ORDERS, NUM_ORDERS):
            numbers = range(first, first + NUM_ORDERS)
            for number in numbers:
                stream.enqueue(number)
            start_s = time.perf_counter()
            for lane, number in enumerate(numbers):
                ring.order(number, OrderCode.RUN, lane)
            while not all(ring.is_done(number) for number in numbers):
                if time.perf_counter() - start_s > _LIMIT_S:
                    raise SystemExit(f"orders: got no end of some within {_LIMIT_S:.0f} s")
                time.sleep(2e-5)
            taken_s.append(time.perf_counter() - start_s)
    ring.close()
    return Result(dcp, num_streams, num_ctas, NUM_ORDERS * shape.num_bytes / statistics.median(taken_s[1:]) / 1e9)


def main() -> int:
    """Print a table: GB/s by programs, for each DCP size and number of streams."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--owner", type=int, default=1, help="GPU of the source; 0 is the one that pulls")
    parser.add_argument("--json", type=Path, help="write all results into this file")
    parser.add_argument("--quick", action="store_true", help="memory of the host, few rows")
    options = parser.parse_args()
    owner: int | None = None if options.quick else options.owner
    if owner is not None:
        check_gpus(parser, owner + 1, QUICK)
    pools = Pools(Shape(2, 2) if options.quick else Shape(61, 113), owner)
    copied = None if owner is None else copied_gbs(pools.target, owner)
    if copied is not None:
        print(f"torch copies {copied:.1f} GB/s from GPU {owner} to GPU 0", flush=True)
    all_ctas = CTAS[:2] if options.quick else CTAS
    print(f"| DCP | streams | {' | '.join(map(str, all_ctas))} |\n|---|---|{'---|' * len(all_ctas)}")
    results: list[Result] = []
    for dcp in DCP_SIZES:
        for num_streams in STREAMS:
            row = [measure(pools, dcp, num_streams, num_ctas) for num_ctas in all_ctas]
            print(f"| {dcp} | {num_streams} | {' | '.join(f'{each.gb_s:.1f}' for each in row)} |", flush=True)
            results += row
        pools.check(dcp)
    if options.json is not None:
        facts = {"copied_gb_s": copied, "results": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
