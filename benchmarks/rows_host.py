"""Times the host packer and landing on one segment: 1152-byte rows of shuffled pages, DCP 8, by threads and layout.

python -m benchmarks.rows_host
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvxfer.layout import Group, LayerRange, PoolLayout, Shard, TokenRange
from kvxfer.rows_host import ByteArray, gather_pieces, scatter_pieces, split_pieces
from kvxfer.wire import PageTable, Piece, match_layouts, plan_chunk, resolve

ROW_BYTES = 1152
PAGE_TOKENS = 64
SEGMENT_BYTES = 8 << 20
NUM_REPEATS = 15


def make_group(num_layers: int, num_pages: int, row_stride_bytes: int) -> Group:
    """A layer-major group of 1152-byte rows."""
    page_bytes = PAGE_TOKENS * row_stride_bytes
    return Group(
        name="kv",
        layers=LayerRange(0, num_layers),
        layer_stride_bytes=num_pages * page_bytes,
        page_stride_bytes=page_bytes,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        row_stride_bytes=row_stride_bytes,
        row_bytes=ROW_BYTES,
    )


def time_case(num_tokens: int, num_layers: int, row_stride_bytes: int, num_threads: int) -> None:
    """Print the rates of gathering from the source's pool and of scattering back into it, one segment at a time."""
    num_pages = num_tokens // PAGE_TOKENS
    src = PoolLayout(groups=(make_group(num_layers, num_pages, row_stride_bytes),), dtype_tag="bf16")
    dst = PoolLayout(groups=src.groups, dtype_tag="bf16", shard=Shard(3, 8))
    wanted = (TokenRange(0, num_tokens),)
    route = match_layouts(src, dst, 3, 8)
    plan = plan_chunk(route, wanted, wanted, ((),), None, SEGMENT_BYTES)
    pages = np.random.default_rng(0).permutation(num_pages).astype(np.int64)
    addresses = resolve(plan, route, "src", src, (PageTable(wanted[0], pages),))
    pool: ByteArray = np.ones(src.groups[0].extent_bytes, dtype=np.uint8)
    slot: ByteArray = np.zeros(SEGMENT_BYTES, dtype=np.uint8)
    first_byte, end_byte = plan.segment_range(0)

    def median_gbs(move: Callable[[list[Piece]], int]) -> float:
        samples = []
        for _ in range(NUM_REPEATS):
            start = time.perf_counter()
            for _ in executor.map(move, split_pieces(plan, plan.pieces(0), num_threads)):
                pass
            samples.append(time.perf_counter() - start)
        return (end_byte - first_byte) / statistics.median(samples) / 1e9

    with ThreadPoolExecutor(num_threads) as executor:
        gather_gbs = median_gbs(lambda job: gather_pieces(pool, plan, addresses, job, slot))
        scatter_gbs = median_gbs(lambda job: scatter_pieces(pool, plan, addresses, job, slot))
    print(
        f"{num_tokens} tokens x {num_layers} layers, row stride {row_stride_bytes}, {num_threads} threads: "
        f"gather {gather_gbs:.1f} GB/s, scatter {scatter_gbs:.1f} GB/s"
    )


def main() -> None:
    """Long and short requests; rows on a grid of their own size, and off it."""
    for num_tokens, num_layers in ((65536, 2), (1024, 61)):
        for row_stride_bytes in (ROW_BYTES, ROW_BYTES + 8):
            for num_threads in (1, 2):
                time_case(num_tokens, num_layers, row_stride_bytes, num_threads)


if __name__ == "__main__":
    main()
