"""Attention over a KV cache that is split over decode ranks (DCP): the merge of the ranks' partial results.

Every rank attends with all heads over its own rows, then `DcpGroup.combine` gives it the merged output of its own
heads. Two back ends:

- `a2a`: pack payload and LSE into one buffer, one all-to-all of bytes, merge what came in.
- `ag_rs`: all-gather of the LSEs, then tile by tile: scale into a bounded head-major staging, reduce-scatter of it.

This module imports torch; agents on the host path do not import it.
"""

import logging
import math
from typing import Literal, overload

import torch
import torch.distributed as dist

from kvxfer.decode.exchange import AllGatherReduceScatter, AllToAll, Exchange, all_gather, choose_backend, tiles
from kvxfer.errors import KernelContractError
from kvxfer.kernels import A2ALayout, LseBase
from kvxfer.kernels._contract import FP8_DTYPES, INT_DTYPES, check_lse_base, check_tensor

__all__ = ["DcpGroup", "align_chunk_tokens"]

_LOG = logging.getLogger(__name__)


def align_chunk_tokens(block: int, size: int, interleave: int, num_tokens: int = 1) -> int:
    """The next multiple, from `num_tokens` up, of lcm(`block`, `size * interleave`): where a prefill chunk may end.

    A chunk of a context that lies split over `size` ranks is gathered rank by rank. Only where it begins and ends on
    such a multiple do all ranks hold equally many rows of it, in whole interleaves, while it also fills whole blocks
    of `block` tokens.

    Raises:
        KernelContractError: an argument below 1.
    """
    for name, got in (("block", block), ("size", size), ("interleave", interleave), ("num_tokens", num_tokens)):
        if got < 1:
            raise KernelContractError(f"{name}: got {got}, expected at least 1")
    step = math.lcm(block, size * interleave)
    return -(-num_tokens // step) * step


class DcpGroup:
    """The merge of partial attention over the ranks of one decode context parallel group.

    Owns its buffers, at fixed addresses: results of up to `max_batch` rows are views of them, valid until the next call
    of the same kind, so that a captured CUDA graph replays without allocating. Larger batches run in tiles through
    the same buffers and return tensors of their own. Use one group object per stream.

    Args:
        process_group: the ranks that share the KV, or None for the default group.
        heads, head_dim: of the partial outputs: all heads of the model, of which every rank gets `heads / world`.
        dtype: of the partial outputs: bf16, fp16, fp32 or fp8 (merged to bf16).
        backend: "a2a", "ag_rs", or "auto"; `backend` and `backend_reason` say what it came to and why.
        lse_base: "e" or "2", the base of the LSEs that the attention kernel returns.
        max_batch: rows (tokens, not requests) that the buffers hold.
        interleave: tokens in a row that one rank owns (1: token by token).
        scale: multiplies the merged output of an fp8 payload.
        device: of the buffers; by default the current CUDA device where the group runs NCCL, else the CPU.

    Raises:
        KernelContractError: heads that do not divide by the world size, an unknown base, dtype or back end.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        backend: Literal["auto", "a2a", "ag_rs"] = "auto",
        *,
        lse_base: LseBase,
        max_batch: int,
        interleave: int = 1,
        scale: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        check_lse_base(lse_base)
        for name, got in (("max_batch", max_batch), ("interleave", interleave)):
            if got < 1:
                raise KernelContractError(f"{name}: got {got}, expected at least 1")
        self.world = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.heads, self.head_dim, self.dtype = heads, head_dim, dtype
        self.max_batch, self.interleave = max_batch, interleave
        largest = A2ALayout(self.world, max_batch, heads, head_dim, dtype)
        self.backend, self.backend_reason = choose_backend(backend, largest)
        if scale is not None and dtype not in FP8_DTYPES:
            raise KernelContractError(f"scale: got {scale} for {dtype}, expected None: only fp8 payloads are scaled")
        # With its index: "cuda" alone is equal to no tensor's device.
        self.device = torch.empty(0, device=device or _device_of(process_group)).device
        self._group = process_group
        self._exchange: Exchange
        if self.world == 1 or self.backend == "a2a":
            self._exchange = AllToAll(process_group, largest, lse_base, scale, self.device)
        else:
            self._exchange = AllGatherReduceScatter(process_group, largest, lse_base, self.device)
        self._result_dtype = largest.result_dtype
        self._result, self._result_lse = self._new_result(max_batch)
        self._query_buffers: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        _LOG.info("DCP combine over %d ranks: %s (%s)", self.world, self.backend, self.backend_reason)

    @overload
    def combine(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        row_lens: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self, out: torch.Tensor, lse: torch.Tensor, *, row_lens: torch.Tensor | None = None, return_lse: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def combine(
        self, out: torch.Tensor, lse: torch.Tensor, *, row_lens: torch.Tensor | None = None, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Merges the ranks' partial results; every rank calls it with as many rows.

        `out`: `[batch, heads, head_dim]` of the group's dtype, this rank's partial output; any strides, read only.
        `lse`: `[batch, heads]` float32, any strides. `row_lens`: `[batch]` int32 or int64, how many keys of this
        rank each row attended to (`shard_lens`); 0 makes `out` and `lse` of the row meaningless, so that padded
        rows, 0 on every rank, give 0 and -inf. Without it only an LSE of -inf or +inf marks such rows.

        Returns `[batch, heads / world, head_dim]`, this rank's heads, and with `return_lse` the merged LSE, `[batch,
        heads / world]` float32. With one rank and no `row_lens` they are `out` and `lse` themselves.

        Raises:
            KernelContractError: shape, dtype or device outside this contract.
        """
        check_tensor("out", out, shape=[None, self.heads, self.head_dim], dtypes=[self.dtype], device=self.device)
        batch = len(out)
        check_tensor("lse", lse, shape=[batch, self.heads], dtypes=[torch.float32], device=self.device)
        if row_lens is not None:
            check_tensor("row_lens", row_lens, shape=[batch], dtypes=INT_DTYPES, device=self.device)
        elif self.world == 1 and self.dtype == self._result_dtype:
            return (out, lse) if return_lse else out
        fits = batch <= self.max_batch
        result, result_lse = (self._result[:batch], self._result_lse[:batch]) if fits else self._new_result(batch)
        for tile in tiles(batch, self.max_batch):
            self._exchange.merge(
                out[tile],
                lse[tile],
                None if row_lens is None else row_lens[tile],
                result[tile],
                result_lse[tile],
            )
        return (result, result_lse) if return_lse else result

    def gather_query(self, query: torch.Tensor) -> torch.Tensor:
        """Gathers the query heads of all ranks: what a rank needs to attend for all heads over its own rows.

        `query`: `[batch, heads / world, query_head_dim]`, any dtype and strides. Returns `[batch, heads,
        query_head_dim]`. The first call with a `query_head_dim` and dtype allocates its buffers: make it before
        capturing a graph.

        Raises:
            KernelContractError: shape or device outside this contract.
        """
        own_heads = self.heads // self.world
        check_tensor("query", query, shape=[None, own_heads, None], dtypes=[query.dtype], device=self.device)
        if self.world == 1:
            return query
        batch, _, dim = query.shape
        own, gathered, result = self._query_buffers_of(dim, query.dtype)
        if batch > self.max_batch:
            result = torch.empty(batch, self.heads, dim, dtype=query.dtype, device=self.device)
        for tile in tiles(batch, self.max_batch):
            num_rows = tile.stop - tile.start
            own_tile, all_tile = own[:num_rows], gathered[: self.world * num_rows]
            own_tile.copy_(query[tile])
            # As bytes: not every collective library gathers every dtype.
            all_gather(all_tile.view(torch.uint8), own_tile.view(torch.uint8), group=self._group)
            by_rank = all_tile.view(self.world, num_rows, own_heads, dim)
            result[tile].view(num_rows, self.world, own_heads, dim).copy_(by_rank.transpose(0, 1))
        return result[:batch]

    def shard_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of the first `seq_lens` tokens this rank owns; integers of any shape, as many come back.

        With N ranks, interleave I and rank r: `(L // (N*I))*I + clamp(L mod (N*I) - r*I, 0, I)`.
        """
        period = self.world * self.interleave
        rest = seq_lens % period - self.rank * self.interleave
        return seq_lens // period * self.interleave + rest.clamp_(0, self.interleave)

    def _new_result(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        own_heads = self.heads // self.world
        result = torch.empty(batch, own_heads, self.head_dim, dtype=self._result_dtype, device=self.device)
        return result, torch.empty(batch, own_heads, dtype=torch.float32, device=self.device)

    def _query_buffers_of(self, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """This rank's heads, all ranks' head-major, and the result, of `max_batch` rows each."""
        buffers = self._query_buffers.get((dim, dtype))
        if buffers is None:
            rows, own_heads = self.max_batch, self.heads // self.world
            shapes = ((rows, own_heads, dim), (self.world * rows, own_heads, dim), (rows, self.heads, dim))
            buffers = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes)
            self._query_buffers[dim, dtype] = buffers
        return buffers


def _device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    if "nccl" in str(dist.get_backend(process_group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
