"""Merging the partial attention of several shards by log-sum-exp, and masking the shards that hold nothing.

With the LSE of shard `s` written `l_s`, the merged output is `sum_s exp(l_s - l) o_s` with `l = log sum_s exp(l_s)`
(the split softmax of FlashDecoding). An LSE of -inf, or +inf as some attention kernels write it, says that the shard
held no key of the row: its output may then be NaN and is dropped by selection. A NaN in the LSE stays a NaN.
"""
# mypy: no-check-untyped-defs, disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from typing import Literal, overload

import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels import reference
from kvxfer.kernels._contract import (
    FP8_DTYPES,
    INT_DTYPES,
    PAYLOAD_DTYPES,
    LseBase,
    check_lse_base,
    check_tensor,
    check_written,
)
from kvxfer.kernels._launch import ceil_div, jit, next_power_of_2, runs_triton, tl

_MAX_BLOCK = 512
_FEW_ROWS = 512


@jit
def known(lse):
    """An LSE of +inf means the same as -inf: no key. NaN stays."""
    return tl.where(lse == float("inf"), float("-inf"), lse)


@jit
def merge_weight(lse, anchor, BASE_2: tl.constexpr):
    if BASE_2:
        return tl.exp2(lse - anchor)
    return tl.exp2((lse - anchor) * 1.4426950408889634)


@jit
def global_lse(anchor, total, BASE_2: tl.constexpr):
    if BASE_2:
        return anchor + tl.log2(total)
    return anchor + tl.log2(total) * 0.6931471805599453


# The strides stay specialised (1 becomes a constant, multiples of 16 allow wide loads); the scale is not.
@jit(do_not_specialize=["scale"])
def _combine_kernel(
    parts, lses, out, lse_out, scale, part_stride_n, part_stride_b, part_stride_h, part_stride_d, lse_stride_n,
    lse_stride_b, lse_stride_h, out_stride_b, out_stride_h, out_stride_d,
    NUM_PARTS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BASE_2: tl.constexpr,
    HAS_SCALE: tl.constexpr, RETURN_LSE: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` columns of one row. All shards' loads are independent, so all are in flight at once."""
    CHUNKS: tl.constexpr = (HEAD_DIM + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // CHUNKS
    cols = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    b = (row // HEADS).to(tl.int64)
    h = (row % HEADS).to(tl.int64)
    inside = cols < HEAD_DIM
    lses += b * lse_stride_b + h * lse_stride_h
    parts += b * part_stride_b + h * part_stride_h + cols.to(tl.int64) * part_stride_d
    anchor = float("-inf")
    shard_lses = ()
    values = ()
    for _ in tl.static_range(NUM_PARTS):
        lse = known(tl.load(lses))
        anchor = tl.maximum(anchor, lse)
        shard_lses = shard_lses + (lse,)  # noqa: RUF005 - Triton's tuples know no unpacking
        values = values + (tl.load(parts, mask=inside, other=0.0),)  # noqa: RUF005
        lses += lse_stride_n
        parts += part_stride_n
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    total = 0.0
    merged = tl.zeros([BLOCK], tl.float32)
    for shard in tl.static_range(NUM_PARTS):
        weight = merge_weight(shard_lses[shard], anchor, BASE_2)
        total += weight
        value = values[shard].to(tl.float32)
        merged += weight * tl.where(shard_lses[shard] == float("-inf"), 0.0, value)
    merged = merged * tl.where(total == 0.0, 0.0, 1.0 / total)
    if HAS_SCALE:
        merged *= scale
    out += b * out_stride_b + h * out_stride_h + cols.to(tl.int64) * out_stride_d
    tl.store(out, merged.to(out.dtype.element_ty), mask=inside)
    if RETURN_LSE:
        tl.store(lse_out + row, global_lse(anchor, total, BASE_2), mask=tl.program_id(0) % CHUNKS == 0)


@jit(do_not_specialize=["num_elements"])
def _mask_empty_kernel(
    lse, row_lens, num_elements, lse_stride_b, lse_stride_h, lens_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = elements < num_elements
    b = (elements // HEADS).to(tl.int64)
    h = (elements % HEADS).to(tl.int64)
    row_len = tl.load(row_lens + b * lens_stride, mask=live, other=1)
    empty = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(lse + b * lse_stride_b + h * lse_stride_h, empty, mask=live & (row_len <= 0))


def launch_combine(
    parts: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse_out: torch.Tensor | None,
    lse_base: LseBase,
    scale: float | None,
) -> None:
    """One launch over `parts` `[N, B, H, D]` and `lses` `[N, B, H]` of any strides; `lse_out` contiguous or None."""
    num_parts, batch, heads, head_dim = parts.shape
    block = min(next_power_of_2(head_dim), _MAX_BLOCK)
    _combine_kernel[(batch * heads * ceil_div(head_dim, block),)](
        parts,
        lses,
        out,
        lses if lse_out is None else lse_out,
        1.0 if scale is None else scale,
        *parts.stride(),
        *lses.stride(),
        *out.stride(),
        NUM_PARTS=num_parts,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
        BASE_2=lse_base == "2",
        HAS_SCALE=scale is not None,
        RETURN_LSE=lse_out is not None,
        # Few rows: more threads a row, for the shortest time. Many: fewer, so that more rows are in flight.
        num_warps=4 if batch * heads <= _FEW_ROWS else 2,
    )


@overload
def lse_combine(
    outs: torch.Tensor, lses: torch.Tensor, *, lse_base: LseBase, return_lse: Literal[False] = False
) -> torch.Tensor: ...


@overload
def lse_combine(
    outs: torch.Tensor, lses: torch.Tensor, *, lse_base: LseBase, return_lse: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def lse_combine(
    outs: torch.Tensor, lses: torch.Tensor, *, lse_base: LseBase, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Merges the partial attention of several shards.

    `outs`: `[num_shards, batch, heads, head_dim]`, bf16, fp16, fp32 or fp8, any strides. `lses`: `[num_shards, batch,
    heads]` float32, any strides, in the base `lse_base` ("e" or "2"). Returns `[batch, heads, head_dim]` in the dtype
    of `outs` (fp8 in: bf16 out), and with `return_lse` the merged LSE, `[batch, heads]` float32 in the same base.
    A row that is empty everywhere gives 0 and -inf.

    Raises:
        KernelContractError: shape, dtype or device outside this contract, or an unknown base.
    """
    check_lse_base(lse_base)
    check_tensor("outs", outs, shape=[None] * 4, dtypes=PAYLOAD_DTYPES)
    check_tensor("lses", lses, shape=outs.shape[:3], dtypes=[torch.float32], device=outs.device)
    if outs.shape[0] == 0:
        raise KernelContractError("outs: got 0 shards, expected at least 1")
    if not runs_triton(outs):
        return reference.lse_combine(outs, lses, lse_base=lse_base, return_lse=return_lse)
    out_dtype = torch.bfloat16 if outs.dtype in FP8_DTYPES else outs.dtype
    out = torch.empty(outs.shape[1:], dtype=out_dtype, device=outs.device)
    lse_out = torch.empty(outs.shape[1:3], dtype=torch.float32, device=outs.device) if return_lse else None
    if out.numel() > 0:
        launch_combine(outs, lses, out, lse_out, lse_base, None)
    return out if lse_out is None else (out, lse_out)


def check_lse_out(lse_out: torch.Tensor, batch: int, heads: int, device: torch.device) -> None:
    check_tensor("lse_out", lse_out, shape=[batch, heads], dtypes=[torch.float32], device=device)
    if not lse_out.is_contiguous():
        raise KernelContractError(f"lse_out: got strides {lse_out.stride()}, expected a contiguous tensor")


def mask_empty_(lse: torch.Tensor, row_lens: torch.Tensor) -> torch.Tensor:
    """Sets **in place** the LSE of rows without a local key to -inf, whatever stood there; returns `lse`.

    `lse`: `[batch, heads]` float32, any strides. `row_lens`: `[batch]` int32 or int64, the local length of each row;
    0 or less is empty (a shard without keys, or padding of a captured batch).

    Raises:
        KernelContractError: shape, dtype or device outside this contract.
    """
    check_tensor("lse", lse, shape=[None, None], dtypes=[torch.float32])
    check_tensor("row_lens", row_lens, shape=[lse.shape[0]], dtypes=INT_DTYPES, device=lse.device)
    check_written("lse", lse)
    if not runs_triton(lse):
        return reference.mask_empty_(lse, row_lens)
    if lse.numel() > 0:
        block = 256
        _mask_empty_kernel[(ceil_div(lse.numel(), block),)](
            lse, row_lens, lse.numel(), *lse.stride(), row_lens.stride(0), HEADS=lse.shape[1], BLOCK=block
        )
    return lse
