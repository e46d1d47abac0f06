"""What `kvxfer bench kernels` times: the cases of each kernel on real shapes, with their goals and the peers' figures.

Peers: the kernels of SGLang 0.5.23 and vLLM 0.33, timed by `graph_us` on an H200 in one run with ours. A batch that
fits the L2 can exceed the copy rate.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from kvxfer.kernels import (
    A2ALayout,
    copy_rows,
    gather_rows,
    mla_decode,
    pack_a2a,
    scale_partial_,
    unpack_combine,
)

ROW_BYTES = 1152
NUM_LAYERS = 61
HEAD_DIM = 512

# Batch, heads, ranks: our goal, SGLang's kernel, vLLM's kernel, microseconds (512 columns, bf16).
PACK_US = {
    (1, 128, 8): (1.6, 1.45, 3.86),
    (8, 128, 8): (1.8, 1.93, 4.08),
    (32, 128, 8): (2.8, 3.69, 4.45),
    (128, 128, 8): (6.2, 11.2, 9.23),
    (512, 128, 8): (34.0, 44.4, 44.3),
    (8192, 64, 4): (352.0, 353.0, 419.0),
}
UNPACK_US = {
    (1, 128, 8): (1.9, 1.77, 1.87),
    (8, 128, 8): (2.0, 1.92, 1.99),
    (32, 128, 8): (2.4, 2.28, 2.63),
    (128, 128, 8): (4.3, 4.67, 5.36),
    (512, 128, 8): (20.0, 25.2, 25.9),
    (8192, 64, 4): (209.0, 210.0, 225.0),
}
# Ranks: tokens in the pool, the goal as a share of the copy rate. More tokens at 8: the L2 must not hold the rows.
GATHER = {1: (32768, 0.93), 4: (32768, 0.88), 8: (131072, 0.85)}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape. `num_bytes` is the least that moves (each input read once, each output written once)."""

    kernel: str
    shape: str
    num_bytes: int
    run: Callable[[], object]
    flops: int = 0
    goal_us: float | None = None
    goal_share: float | None = None
    goal_tflops: float | None = None
    peers_us: dict[str, float] = field(default_factory=dict)


def builders() -> list[tuple[str, Callable[[], Case]]]:
    """Every case as the name of its kernel and what makes it: its tensors are made then, and go with it."""
    found: list[tuple[str, Callable[[], Case]]] = []
    for world, (num_tokens, share) in GATHER.items():
        found.append(("gather_rows", partial(gather_case, world, num_tokens, share)))
    found += [("copy_rows", partial(copy_case, world, 65536)) for world in (4, 8)]
    for kernel, build, figures in (("pack_a2a", pack_case, PACK_US), ("unpack_combine", unpack_case, UNPACK_US)):
        for (batch, heads, world), (goal_us, sglang_us, vllm_us) in figures.items():
            peers_us = {"sglang": sglang_us, "vllm": vllm_us}
            found.append((kernel, partial(build, batch, heads, world, goal_us, peers_us)))
    found.append(("scale_partial_", partial(scale_case, 16384, 96, 4)))
    found.append(("mla_decode", partial(mla_case, 16, 0.7, None)))
    found.append(("mla_decode", partial(mla_case, 128, None, 200.0)))
    return found


def random_pool(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A KV pool `[num_layers, num_tokens, row_bytes]` of random bytes, and its layers' addresses."""
    pool = torch.empty(NUM_LAYERS, num_tokens, ROW_BYTES, dtype=torch.uint8, device="cuda")
    pool.view(torch.int64).random_()
    ptrs = torch.tensor([layer.data_ptr() for layer in pool], dtype=torch.int64, device="cuda")
    return pool, ptrs


def gather_case(world: int, num_tokens: int, share: float) -> Case:
    """The rows that one of `world` ranks owns, token by token, gathered out of a pool in token order."""
    pool, ptrs = random_pool(num_tokens)
    rows = torch.arange(0, num_tokens, world, device="cuda")
    out = torch.empty(NUM_LAYERS * len(rows) * ROW_BYTES, dtype=torch.uint8, device="cuda")

    def run(_pool: torch.Tensor = pool) -> None:
        gather_rows(ptrs, rows, out, ROW_BYTES, ROW_BYTES)

    return Case("gather_rows", f"dcp {world}, {num_tokens} tokens", 2 * len(out), run, goal_share=share)


def copy_case(world: int, num_tokens: int) -> Case:
    """One rank's rows straight into shuffled pages of 64 rows of another pool: what p2p on one host does."""
    pool, ptrs = random_pool(num_tokens)
    rows = torch.arange(0, num_tokens, world, device="cuda")
    target, target_ptrs = random_pool(len(rows))
    pages = torch.randperm(len(rows) // 64, device="cuda")
    target_rows = (pages[:, None] * 64 + torch.arange(64, device="cuda")).flatten()
    num_bytes = 2 * NUM_LAYERS * len(rows) * ROW_BYTES

    def run(_pools: tuple[torch.Tensor, ...] = (pool, target)) -> None:
        copy_rows(ptrs, rows, target_ptrs, target_rows, ROW_BYTES, ROW_BYTES, ROW_BYTES)

    return Case("copy_rows", f"dcp {world}, {num_tokens} tokens, shuffled pages", num_bytes, run)


def partial_output(batch: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.randn(batch, heads, HEAD_DIM, dtype=dtype, device="cuda")
    return out, torch.randn(batch, heads, device="cuda")


def pack_case(batch: int, heads: int, world: int, goal_us: float, peers_us: dict[str, float]) -> Case:
    layout = A2ALayout(world, batch, heads, HEAD_DIM, torch.bfloat16)
    out, lse = partial_output(batch, heads, layout.dtype)
    send = torch.empty(layout.total_bytes, dtype=torch.uint8, device="cuda")
    shape = f"B {batch}, H {heads}, N {world}"
    num_bytes = 2 * world * (layout.payload_bytes + layout.lse_bytes)
    return Case(
        "pack_a2a", shape, num_bytes, lambda: pack_a2a(out, lse, send, layout), goal_us=goal_us, peers_us=peers_us
    )


def unpack_case(batch: int, heads: int, world: int, goal_us: float, peers_us: dict[str, float]) -> Case:
    layout = A2ALayout(world, batch, heads, HEAD_DIM, torch.bfloat16)
    recv = torch.empty(layout.total_bytes, dtype=torch.uint8, device="cuda")
    layout.payload(recv).copy_(torch.randn(layout.payload(recv).shape, device="cuda"))
    layout.lse(recv).normal_()
    result = torch.empty(batch, layout.heads_per_rank, HEAD_DIM, dtype=layout.result_dtype, device="cuda")
    num_bytes = world * (layout.payload_bytes + layout.lse_bytes) + layout.payload_bytes
    return Case(
        "unpack_combine",
        f"B {batch}, H {heads}, N {world}",
        num_bytes,
        lambda: unpack_combine(recv, layout, lse_base="e", out=result),
        goal_us=goal_us,
        peers_us=peers_us,
    )


def scale_case(batch: int, heads: int, world: int) -> Case:
    """A prefill-sized partial in float32, 3 GiB; the goal is 1.1 times its bytes at the copy rate."""
    out, _ = partial_output(batch, heads, torch.float32)
    # Equal LSEs on every rank but a dominant own one: the weight is close to 1, so that repeated scaling stays finite.
    lses = torch.zeros(world, batch, heads, device="cuda")
    lses[1] = 40.0
    lse_out = torch.empty(batch, heads, device="cuda")
    num_bytes = 2 * out.nbytes + lses.nbytes + lse_out.nbytes
    return Case(
        "scale_partial_",
        f"[{batch}, {heads}, {HEAD_DIM}] fp32, N {world}",
        num_bytes,
        lambda: scale_partial_(out, lses, 1, lse_base="e", lse_out=lse_out),
        goal_share=1 / 1.1,
        peers_us={"vllm": 2410.0},
    )


def mla_case(heads: int, goal_share: float | None, goal_tflops: float | None) -> Case:
    """Decode attention over 32k local tokens in shuffled pages of 64 rows, batch 32."""
    batch, num_tokens, page_tokens, rope_dim = 32, 32768, 64, 64
    num_pages = batch * num_tokens // page_tokens
    dim = HEAD_DIM + rope_dim
    pages = torch.randn(num_pages, page_tokens, dim, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(num_pages, device="cuda", dtype=torch.int32).view(batch, -1)
    lens = torch.full((batch,), num_tokens, dtype=torch.int32, device="cuda")
    query = torch.randn(batch, heads, dim, dtype=torch.bfloat16, device="cuda")
    return Case(
        "mla_decode",
        f"B {batch}, H {heads}, {num_tokens} tokens",
        pages.nbytes + query.nbytes + batch * heads * HEAD_DIM * 2,
        lambda: mla_decode(query, pages, table, lens, dim**-0.5, v_head_dim=HEAD_DIM),
        flops=2 * batch * heads * num_tokens * (dim + HEAD_DIM),
        goal_share=goal_share,
        goal_tflops=goal_tflops,
    )
