"""Every op of `kvxfer.kernels` in plain vectorised torch, with the same signatures: the CPU path, and a judge.

Arithmetic is float32 inside, in `mla_decode` float64. Arguments are taken to be within the contract that the wrapper
of the same name checks. Payloads are moved as bytes, so that packing keeps every bit, also of NaNs.
"""

import ctypes

import numpy as np
import torch

from kvxfer.kernels._contract import FP8_DTYPES, LseBase
from kvxfer.kernels.a2a_layout import A2ALayout
from kvxfer.kernels.reference_mla import mla_decode
from kvxfer.kernels.reference_moves import move_rows

__all__ = [
    "copy_rows",
    "gather_rows",
    "lse_combine",
    "mask_empty_",
    "mla_decode",
    "move_rows",
    "pack_a2a",
    "scale_partial_",
    "scale_to_staging",
    "unpack_combine",
]

_NEG_INF = float("-inf")


def copy_rows(
    src_layer_ptrs: torch.Tensor,
    src_rows: torch.Tensor,
    dst_layer_ptrs: torch.Tensor,
    dst_rows: torch.Tensor,
    row_bytes: int,
    src_row_stride: int,
    dst_row_stride: int,
) -> None:
    """As `kvxfer.kernels.copy_rows`; the addresses are of this process's memory."""
    src_max, dst_max = int(src_rows.max()), int(dst_rows.max())
    for src_ptr, dst_ptr in zip(src_layer_ptrs.tolist(), dst_layer_ptrs.tolist(), strict=True):
        dst = _host_rows(dst_ptr, dst_max, row_bytes, dst_row_stride)
        dst[dst_rows] = _host_rows(src_ptr, src_max, row_bytes, src_row_stride)[src_rows]


def gather_rows(
    layer_ptrs: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, row_bytes: int, row_stride: int
) -> None:
    """As `kvxfer.kernels.gather_rows`; the addresses are of this process's memory."""
    needed_bytes = len(layer_ptrs) * len(rows) * row_bytes
    by_layer = out[:needed_bytes].view(len(layer_ptrs), len(rows), row_bytes)
    max_row = int(rows.max())
    for dense, ptr in zip(by_layer, layer_ptrs.tolist(), strict=True):
        torch.index_select(_host_rows(ptr, max_row, row_bytes, row_stride), 0, rows, out=dense)


def _host_rows(address: int, max_row: int, row_bytes: int, row_stride: int) -> torch.Tensor:
    """The rows `[0, max_row]` at a raw address as uint8 `[max_row + 1, row_bytes]`; borrows, frees nothing."""
    num_bytes = max_row * row_stride + row_bytes
    borrowed = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    return torch.from_numpy(borrowed).as_strided((max_row + 1, row_bytes), (row_stride, 1))


def pack_a2a(
    out: torch.Tensor,
    lse: torch.Tensor,
    send: torch.Tensor,
    layout: A2ALayout,
    *,
    row_lens: torch.Tensor | None = None,
) -> None:
    """As `kvxfer.kernels.pack_a2a`."""
    bits = torch.uint8 if layout.dtype in FP8_DTYPES else layout.dtype
    payload = layout.payload(send).view(bits)
    payload.copy_(_head_major(out.view(bits), layout.world))
    layout.lse(send).copy_(_head_major(lse, layout.world))
    if row_lens is not None:
        empty = row_lens <= 0
        payload[:, empty] = 0
        layout.lse(send)[:, empty] = _NEG_INF


def _head_major(rows: torch.Tensor, world: int) -> torch.Tensor:
    """`[batch, heads, ...]` as `[world, batch, heads / world, ...]`, a view."""
    return rows.view(rows.shape[0], world, -1, *rows.shape[2:]).transpose(0, 1)


def unpack_combine(
    recv: torch.Tensor,
    layout: A2ALayout,
    *,
    lse_base: LseBase,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `kvxfer.kernels.unpack_combine`."""
    combined, global_lse = _combine(layout.payload(recv), layout.lse(recv), lse_base)
    if scale is not None:
        combined *= scale
    out = combined.to(layout.result_dtype) if out is None else out.copy_(combined)
    if not return_lse:
        return out
    return out, global_lse if lse_out is None else lse_out.copy_(global_lse)


def lse_combine(
    outs: torch.Tensor, lses: torch.Tensor, *, lse_base: LseBase, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `kvxfer.kernels.lse_combine`."""
    combined, global_lse = _combine(outs, lses, lse_base)
    combined = combined.to(torch.bfloat16 if outs.dtype in FP8_DTYPES else outs.dtype)
    return (combined, global_lse) if return_lse else combined


def _combine(outs: torch.Tensor, lses: torch.Tensor, lse_base: LseBase) -> tuple[torch.Tensor, torch.Tensor]:
    weights, global_lse, empty = _weights(lses, lse_base)
    # One shard at a time: a float32 copy of all of them would be the largest tensor of the step.
    combined = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for part, weight, nothing in zip(outs, weights, empty, strict=True):
        combined += torch.where(nothing[..., None], 0.0, part.float() * weight[..., None])
    return combined, global_lse


def _weights(lses: torch.Tensor, lse_base: LseBase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over shards: weights `[N, B, H]`, global LSE `[B, H]`, and which shards are empty (LSE -inf or +inf)."""
    exp, log = (torch.exp, torch.log) if lse_base == "e" else (torch.exp2, torch.log2)
    empty = torch.isinf(lses)
    known = torch.where(empty, _NEG_INF, lses.float())
    top = known.amax(dim=0)
    anchor = torch.where(top == _NEG_INF, 0.0, top)
    weights = exp(known - anchor)
    total = weights.sum(dim=0)
    weights = torch.where(empty, 0.0, weights / total)
    return weights, anchor + log(total), empty


def scale_partial_(
    out: torch.Tensor,
    lses: torch.Tensor,
    rank: int,
    *,
    lse_base: LseBase,
    lse_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kvxfer.kernels.scale_partial_`."""
    weights, global_lse, empty = _weights(lses, lse_base)
    out.mul_(weights[rank][..., None])
    out.masked_fill_(empty[rank][..., None], 0.0)
    return global_lse if lse_out is None else lse_out.copy_(global_lse)


def scale_to_staging(
    out: torch.Tensor,
    lses: torch.Tensor,
    rank: int,
    staging: torch.Tensor,
    *,
    lse_base: LseBase,
    lse_out: torch.Tensor,
) -> None:
    """As `kvxfer.kernels.scale_to_staging`."""
    weights, global_lse, empty = _weights(lses, lse_base)
    world = staging.shape[0]
    torch.mul(_head_major(out, world), _head_major(weights[rank], world)[..., None], out=staging)
    staging.masked_fill_(_head_major(empty[rank], world)[..., None], 0.0)
    lse_out.copy_(global_lse)


def mask_empty_(lse: torch.Tensor, row_lens: torch.Tensor) -> torch.Tensor:
    """As `kvxfer.kernels.mask_empty_`."""
    return lse.masked_fill_((row_lens <= 0)[:, None], _NEG_INF)
