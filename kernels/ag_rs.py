"""Scaling one shard's partial attention by its weight, so that a plain sum over the ranks merges it.

The second half of all-gather (of the LSEs) and reduce-scatter (of the scaled outputs over heads). A tensor of the
size of the partial output is never allocated: it is scaled where it lies, or tile by tile into a bounded staging.
"""
# mypy: no-check-untyped-defs, disable-error-code="no-untyped-def, untyped-decorator"

import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels import reference
from kvxfer.kernels._contract import LseBase, check_apart, check_lse_base, check_tensor, check_written
from kvxfer.kernels._launch import ceil_div, jit, next_power_of_2, runs_triton, tl
from kvxfer.kernels.combine import check_lse_out, global_lse, known, merge_weight

_MAX_BLOCK = 512
_BLOCK_ELEMENTS = 1024
_NUM_WARPS = 2


@jit(do_not_specialize=["rank", "num_rows"])
def _scale_kernel(
    out, lses, target, lse_out, rank, num_rows, out_stride_b, out_stride_h, out_stride_d, lse_stride_n, lse_stride_b,
    lse_stride_h, target_stride_n, target_stride_b, target_stride_h, target_stride_d,
    NUM_PARTS: tl.constexpr, HEADS: tl.constexpr, TARGET_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """Scales `ROWS` rows of one shard by their weight; `target` is `out` itself or a head-major staging."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    b = (rows // HEADS).to(tl.int64)
    h = rows % HEADS
    lses += b * lse_stride_b + h.to(tl.int64) * lse_stride_h
    anchor = tl.full([ROWS], float("-inf"), tl.float32)
    for _ in tl.static_range(NUM_PARTS):
        anchor = tl.maximum(anchor, known(tl.load(lses, mask=live, other=0.0)))
        lses += lse_stride_n
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    total = tl.zeros([ROWS], tl.float32)
    own = tl.full([ROWS], float("-inf"), tl.float32)
    for shard in tl.static_range(NUM_PARTS):
        # Back from the last shard to the first: the addresses are where the loop above left them.
        lses -= lse_stride_n
        lse = known(tl.load(lses, mask=live, other=0.0))
        total += merge_weight(lse, anchor, BASE_2)
        own = tl.where(rank == NUM_PARTS - 1 - shard, lse, own)
    weight = merge_weight(own, anchor, BASE_2) / total
    tl.store(lse_out + rows, global_lse(anchor, total, BASE_2), mask=live)
    out += b * out_stride_b + h.to(tl.int64) * out_stride_h
    peer = (h // TARGET_HEADS).to(tl.int64)
    target += peer * target_stride_n + b * target_stride_b + (h % TARGET_HEADS).to(tl.int64) * target_stride_h
    for first_col in tl.static_range(0, HEAD_DIM, BLOCK):
        cols = first_col + tl.arange(0, BLOCK)
        inside = live[:, None] & (cols < HEAD_DIM)[None, :]
        cols = cols.to(tl.int64)
        values = tl.load(out[:, None] + (cols * out_stride_d)[None, :], mask=inside, other=0.0).to(tl.float32)
        values = tl.where((own == float("-inf"))[:, None], 0.0, values * weight[:, None])
        values = values.to(target.dtype.element_ty)
        tl.store(target[:, None] + (cols * target_stride_d)[None, :], values, mask=inside)


def scale_partial_(
    out: torch.Tensor,
    lses: torch.Tensor,
    rank: int,
    *,
    lse_base: LseBase,
    lse_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales one shard's partial output **in place** by its weight in the merge, so that the shards' plain sum is it.

    `out`: `[batch, heads, head_dim]`, bf16, fp16 or fp32, any strides; overwritten. `lses`: `[num_shards, batch,
    heads]` float32, any strides, of all shards; `rank` is the one that `out` belongs to. Returns the merged LSE,
    `[batch, heads]` float32, in `lse_out` if given (contiguous). Nothing of the size of `out` is allocated.

    Raises:
        KernelContractError: shape, dtype, device or rank outside this contract, or an unknown base.
    """
    _check_scale(out, lses, rank, lse_base, lse_out)
    check_written("out", out)
    if not runs_triton(out):
        return reference.scale_partial_(out, lses, rank, lse_base=lse_base, lse_out=lse_out)
    if lse_out is None:
        lse_out = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    _launch_scale(out, lses, rank, out[None], lse_base, lse_out)
    return lse_out


def scale_to_staging(
    out: torch.Tensor,
    lses: torch.Tensor,
    rank: int,
    staging: torch.Tensor,
    *,
    lse_base: LseBase,
    lse_out: torch.Tensor,
) -> None:
    """As `scale_partial_`, but into a head-major staging: what a reduce-scatter over heads sends; `out` stays.

    `staging`: `[world, batch, heads / world, head_dim]`, the dtype of `out`, any strides. `lse_out` as there.

    Raises:
        KernelContractError: shape, dtype, device or rank outside this contract, or an unknown base.
    """
    _check_scale(out, lses, rank, lse_base, lse_out)
    batch, heads, head_dim = out.shape
    check_tensor("staging", staging, shape=[None, batch, None, head_dim], dtypes=[out.dtype], device=out.device)
    if staging.shape[0] * staging.shape[2] != heads:
        raise KernelContractError(
            f"staging: got {staging.shape[0]} ranks of {staging.shape[2]} heads, expected {heads} heads together"
        )
    check_written("staging", staging)
    check_apart("staging", staging, "out", out)
    if runs_triton(out):
        _launch_scale(out, lses, rank, staging, lse_base, lse_out)
    else:
        reference.scale_to_staging(out, lses, rank, staging, lse_base=lse_base, lse_out=lse_out)


def _check_scale(
    out: torch.Tensor, lses: torch.Tensor, rank: int, lse_base: LseBase, lse_out: torch.Tensor | None
) -> None:
    check_lse_base(lse_base)
    check_tensor("out", out, shape=[None] * 3, dtypes=[torch.bfloat16, torch.float16, torch.float32])
    check_tensor("lses", lses, shape=[None, *out.shape[:2]], dtypes=[torch.float32], device=out.device)
    if not 0 <= rank < lses.shape[0]:
        raise KernelContractError(
            f"rank: got {rank}, expected 0 to {lses.shape[0] - 1}: lses has {lses.shape[0]} shards"
        )
    if lse_out is not None:
        check_lse_out(lse_out, out.shape[0], out.shape[1], out.device)
        check_apart("lse_out", lse_out, "lses", lses)


def _launch_scale(
    out: torch.Tensor, lses: torch.Tensor, rank: int, target: torch.Tensor, lse_base: LseBase, lse_out: torch.Tensor
) -> None:
    batch, heads, head_dim = out.shape
    if out.numel() == 0:
        return
    block = min(next_power_of_2(head_dim), _MAX_BLOCK)
    rows = max(_BLOCK_ELEMENTS // block, 1)
    _scale_kernel[(ceil_div(batch * heads, rows),)](
        out,
        lses,
        target,
        lse_out,
        rank,
        batch * heads,
        *out.stride(),
        *lses.stride(),
        *target.stride(),
        NUM_PARTS=lses.shape[0],
        HEADS=heads,
        TARGET_HEADS=target.shape[2],
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK=block,
        BASE_2=lse_base == "2",
        num_warps=_NUM_WARPS,
    )
