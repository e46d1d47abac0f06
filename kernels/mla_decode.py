"""Absorbed MLA attention of one decode step over the rows that one rank holds.

With the up-projections absorbed into query and output, every head attends to the same latent rows: a row of D values is
the key, its first `v_head_dim` values are the value. Out come the softmax-weighted values over this rank's rows and
the log-sum-exp with which the ranks' partial results are merged (`lse_combine`, `DcpGroup`).

CUDA tensors run Triton kernels, CPU tensors vectorised torch; under TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

import math
from typing import Literal, overload

import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels._contract import INT_DTYPES
from kvxfer.kernels._launch import runs_triton

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@overload
def mla_decode(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    return_lse: Literal[True] = True,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def mla_decode(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    return_lse: Literal[False],
) -> torch.Tensor: ...


def mla_decode(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """Attend with `q` over the first `row_lens` local rows of every sequence.

    Args:
        q: `[B, H, D]` (one position) or `[B, q_len, H, D]`, D = kv_lora_rank + rope; bf16, fp16 or fp32; any strides,
            last dimension contiguous.
        kv_pages: `[num_pages, page_tokens, D]`, dtype and device of `q`; any page and row stride (a layer inside a
            larger pool), last dimension contiguous. 16-byte aligned rows are fastest, and so are pages of a multiple
            of 64 tokens.
        page_table: `[B, max_pages]` int32 or int64: local row j of sequence b lies in page `page_table[b, j //
            page_tokens]` at row `j % page_tokens`. Entries past the rows in use are not read.
        row_lens: `[B]`, or `[B, q_len]` when each position sees a length of its own (speculative verify); int32 or
            int64; in local rows of this rank. At most `max_pages * page_tokens`: on the CPU more is an error, on a GPU
            (where lengths are not known to the host) it gives NaN in that row's output and LSE.
        scale: positive factor on the scores, before the softmax.
        v_head_dim: how many leading values of a row are the value (kv_lora_rank).
        return_lse: also return the LSE.

    Returns:
        `out`, the shape of `q` with `v_head_dim` in place of D, in `q`'s dtype, contiguous; and `lse`, the shape of
        `out` without its last dimension, fp32, **base e**. Where a length is 0: out 0, LSE -inf. Products accumulate
        in fp32. Memory comes from the caching allocator and nothing is read back to the host, so the call can be
        captured in a CUDA graph; lengths and page table may change between replays, their shapes may not.

    Raises:
        KernelContractError: an argument of the wrong dtype, shape, stride or device; a length or page id out of range
            (on the CPU). Raised before any launch.
    """
    _check_query(q, v_head_dim)
    if not 0 < scale < math.inf:
        raise KernelContractError(f"scale: got {scale}, expected a positive number")
    _check_pages(q, kv_pages, page_table)
    _check_lens(q, row_lens)
    if page_table.device.type == "cpu":
        _check_values(kv_pages, page_table, row_lens)
    positions = q if q.dim() == 4 else q.unsqueeze(1)
    lens = row_lens if row_lens.dim() == 2 else row_lens.unsqueeze(1).expand(-1, positions.shape[1])
    out, lse = _attend(positions, kv_pages, page_table, lens, scale, v_head_dim)
    if q.dim() == 3:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


def _attend(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale: float,
    v_head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not runs_triton(q):
        return attend_torch(q, kv_pages, page_table, row_lens, scale, v_head_dim)
    if q.shape[0] * q.shape[1] == 0 or page_table.shape[1] == 0 or kv_pages.shape[0] == 0:
        return _nothing(q, v_head_dim)
    # Here, so that a CPU installation works without Triton.
    from kvxfer.kernels._mla_split import attend

    return attend(q, kv_pages, page_table, row_lens, scale, v_head_dim)


def attend_torch(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale: float,
    v_head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch path: `q [B, q_len, H, D]`, `row_lens [B, q_len]`; arguments already checked; fp32 inside."""
    page_tokens = kv_pages.shape[1]
    longest = int(row_lens.max()) if row_lens.numel() else 0
    if longest == 0:
        return _nothing(q, v_head_dim)
    row = torch.arange(longest, device=q.device)
    held = row < row_lens.amax(1, keepdim=True)  # [B, longest]
    visible = (row < row_lens.unsqueeze(-1)).unsqueeze(2)  # [B, q_len, 1, longest]
    page = torch.where(held, page_table[:, row // page_tokens].long(), 0)
    # Rows past the end may hold NaN; they are replaced, not multiplied by 0.
    kv = kv_pages[page, row % page_tokens].float().masked_fill(~held.unsqueeze(-1), 0.0)
    scores = torch.einsum("bthd,bnd->bthn", q.float(), kv) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    shift = torch.where(lse == float("-inf"), 0.0, lse)
    probs = torch.exp(scores - shift.unsqueeze(-1))
    out = torch.einsum("bthn,bnv->bthv", probs, kv[..., :v_head_dim])
    return out.to(q.dtype), lse


def _nothing(q: torch.Tensor, v_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_zeros((*q.shape[:3], v_head_dim))
    return out, q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)


def _check_query(q: torch.Tensor, v_head_dim: int) -> None:
    if q.dim() not in (3, 4):
        raise KernelContractError(f"q: got shape {tuple(q.shape)}, expected [B, H, D] or [B, q_len, H, D]")
    if q.dtype not in _DTYPES:
        raise KernelContractError(f"q: got {q.dtype}, expected bfloat16, float16 or float32")
    if q.shape[-2] == 0 or q.stride(-1) != 1:
        raise KernelContractError(
            f"q: got shape {tuple(q.shape)}, strides {q.stride()}, expected H > 0 and a contiguous last dimension"
        )
    if not 0 < v_head_dim <= q.shape[-1]:
        raise KernelContractError(f"v_head_dim: got {v_head_dim}, expected 1 to {q.shape[-1]}, the row length of q")


def _check_pages(q: torch.Tensor, kv_pages: torch.Tensor, page_table: torch.Tensor) -> None:
    if kv_pages.dim() != 3 or kv_pages.shape[2] != q.shape[-1] or kv_pages.shape[1] == 0:
        raise KernelContractError(
            f"kv_pages: got shape {tuple(kv_pages.shape)}, expected [num_pages, page_tokens, {q.shape[-1]}]"
        )
    if kv_pages.dtype != q.dtype or kv_pages.device != q.device:
        raise KernelContractError(
            f"kv_pages: got {kv_pages.dtype} on {kv_pages.device}, expected {q.dtype} on {q.device}, as q"
        )
    if kv_pages.stride(2) != 1:
        raise KernelContractError(
            f"kv_pages: got strides {kv_pages.stride()}, expected a contiguous last dimension (whole rows)"
        )
    _check_index("page_table", page_table, q, [(q.shape[0], page_table.shape[-1])], "[B, max_pages]")
    if page_table.stride(1) != 1:
        raise KernelContractError(f"page_table: got strides {page_table.stride()}, expected contiguous rows")


def _check_lens(q: torch.Tensor, row_lens: torch.Tensor) -> None:
    q_len = q.shape[1] if q.dim() == 4 else 1
    _check_index("row_lens", row_lens, q, [(q.shape[0],), (q.shape[0], q_len)], "[B] or [B, q_len]")


def _check_index(name: str, index: torch.Tensor, q: torch.Tensor, shapes: list[tuple[int, ...]], meaning: str) -> None:
    if tuple(index.shape) not in shapes:
        raise KernelContractError(f"{name}: got shape {tuple(index.shape)}, expected {shapes} ({meaning})")
    if index.dtype not in INT_DTYPES or index.device != q.device:
        raise KernelContractError(
            f"{name}: got {index.dtype} on {index.device}, expected int32 or int64 on {q.device}, as q"
        )


def _check_values(kv_pages: torch.Tensor, page_table: torch.Tensor, row_lens: torch.Tensor) -> None:
    num_pages, page_tokens = kv_pages.shape[:2]
    table_rows = page_table.shape[1] * page_tokens
    if row_lens.numel() == 0:
        return
    low, high = int(row_lens.min()), int(row_lens.max())
    if low < 0 or high > table_rows:
        raise KernelContractError(
            f"row_lens: got {low} to {high}, expected 0 to {table_rows}, the rows that page_table can name"
        )
    longest = row_lens if row_lens.dim() == 1 else row_lens.amax(1)
    used = torch.arange(page_table.shape[1]) * page_tokens < longest.unsqueeze(1)
    bad = used & ((page_table < 0) | (page_table >= num_pages))
    if bool(bad.any()):
        sequence, slot = (int(i) for i in bad.nonzero()[0])
        raise KernelContractError(
            f"page_table[{sequence}, {slot}]: got page {int(page_table[sequence, slot])}, expected 0 to {num_pages - 1}"
        )
