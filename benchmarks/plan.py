"""Times the planning of 1,000,000 tokens x 61 layers for one of 8 decode ranks: both sides, every segment.

    python -m benchmarks.plan

Exits with status 1 where a plan takes longer than 50 ms.
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np

from kvxfer.layout import Group, LayerRange, PoolLayout, Shard, TokenRange
from kvxfer.ownership import num_pages_of
from kvxfer.wire import PageTable, check_complete, check_pages, count_runs, match_layouts, plan_chunk, resolve

NUM_TOKENS = 1_000_000
NUM_LAYERS = 61
ROW_BYTES = 1152
SEGMENT_BYTES = 8 << 20
NUM_REPEATS = 5
LIMIT_S = 0.05
# (source shard, its page, destination shard, its page)
CASES = (
    (Shard(), 64, Shard(3, 8), 64),
    (Shard(), 64, Shard(3, 8, 64), 64),
    (Shard(1, 4), 16, Shard(5, 8, 64), 1),
)


def make_side(shard: Shard, page_tokens: int) -> tuple[PoolLayout, PageTable]:
    """A pool just large enough, and shuffled pages for every token."""
    token_range = TokenRange(0, NUM_TOKENS)
    num_pages = num_pages_of(shard, page_tokens, token_range)
    page_bytes = page_tokens * ROW_BYTES
    group = Group(
        name="kv",
        layers=LayerRange(0, NUM_LAYERS),
        layer_stride_bytes=num_pages * page_bytes,
        page_stride_bytes=page_bytes,
        num_pages=num_pages,
        page_tokens=page_tokens,
        row_stride_bytes=ROW_BYTES,
        row_bytes=ROW_BYTES,
    )
    pages = np.random.default_rng(0).permutation(num_pages).astype(np.int64)
    return PoolLayout(groups=(group,), shard=shard, dtype_tag="bf16"), PageTable(token_range, pages)


def time_plan(
    src: PoolLayout, src_table: PageTable, dst: PoolLayout, dst_table: PageTable
) -> tuple[dict[str, float], int, int]:
    """Milliseconds of each step, rows and segments of the plan."""
    route = match_layouts(src, dst, dst.shard.rank, dst.shard.size)
    wanted = (TokenRange(0, NUM_TOKENS),)
    stamps = [("start", time.perf_counter())]
    plan = plan_chunk(route, wanted, wanted, ((),), None, SEGMENT_BYTES)
    stamps.append(("plan", time.perf_counter()))
    check_pages(src.groups[0], src.shard, src_table.token_range, src_table.pages)
    check_pages(dst.groups[0], dst.shard, dst_table.token_range, dst_table.pages)
    stamps.append(("check_pages", time.perf_counter()))
    src_addresses = resolve(plan, route, "src", src, (src_table,))
    resolve(plan, route, "dst", dst, (dst_table,))
    stamps.append(("resolve", time.perf_counter()))
    for segment_idx in range(plan.num_segments):
        plan.pieces(segment_idx)
    stamps.append(("pieces", time.perf_counter()))
    count_runs(plan, src_addresses)
    stamps.append(("count_runs", time.perf_counter()))
    ranks = [at_rank(src, rank) for rank in range(src.shard.size)]
    routes = [match_layouts(each, dst, dst.shard.rank, dst.shard.size) for each in ranks]
    check_complete(routes, dst, wanted, ((),))
    stamps.append(("check_complete", time.perf_counter()))
    steps = {name: (now - before) * 1e3 for (_, before), (name, now) in itertools.pairwise(stamps)}
    return steps, plan.num_rows, plan.num_segments


def at_rank(layout: PoolLayout, rank: int) -> PoolLayout:
    """The same layout at another rank."""
    shard = Shard(rank, layout.shard.size, layout.shard.interleave)
    return PoolLayout(groups=layout.groups, shard=shard, dtype_tag=layout.dtype_tag)


def main() -> int:
    """Print the median of each case; 1 where one is over the limit."""
    slowest_ms = 0.0
    for src_shard, src_page, dst_shard, dst_page in CASES:
        src, src_table = make_side(src_shard, src_page)
        dst, dst_table = make_side(dst_shard, dst_page)
        samples = [time_plan(src, src_table, dst, dst_table) for _ in range(NUM_REPEATS)]
        steps, num_rows, num_segments = sorted(samples, key=lambda sample: sum(sample[0].values()))[NUM_REPEATS // 2]
        total_ms = sum(steps.values())
        slowest_ms = max(slowest_ms, total_ms)
        detail = ", ".join(f"{name} {ms:.2f}" for name, ms in steps.items())
        print(f"{src_shard} page {src_page} -> {dst_shard} page {dst_page}: {num_rows} rows, {num_segments} segments")
        print(f"  {total_ms:.1f} ms ({detail})")
    print(f"slowest plan: {slowest_ms:.1f} ms, limit {LIMIT_S * 1e3:.0f} ms")
    return int(slowest_ms > LIMIT_S * 1e3)


if __name__ == "__main__":
    sys.exit(main())
