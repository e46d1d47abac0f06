"""The two ways in which the ranks of a DCP group exchange partial attention, one tile of rows at a time."""

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from kvxfer.errors import KernelContractError
from kvxfer.kernels import A2ALayout, LseBase, mask_empty_, pack_a2a, scale_to_staging, unpack_combine
from kvxfer.kernels._contract import FP8_DTYPES

# `auto` takes all-to-all as long as its two buffers stay below this.
AUTO_A2A_BUFFERS_BYTES = 1 << 30
# The staging of `ag_rs`: large enough for the wire's full rate, small beside the partial outputs it spares.
STAGING_BYTES = 32 << 20

# torch 2.13 renames these two and deprecates the old names; earlier releases have only those.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def choose_backend(backend: str, largest: A2ALayout) -> tuple[Literal["a2a", "ag_rs"], str]:
    """The back end and why; `largest` is the layout of the largest batch that goes through the buffers at once."""
    if backend not in ("auto", "a2a", "ag_rs"):
        raise KernelContractError(f"backend: got {backend!r}, expected 'auto', 'a2a' or 'ag_rs'")
    if largest.dtype in FP8_DTYPES:
        if backend == "ag_rs":
            raise KernelContractError(
                f"dtype: got {largest.dtype} with ag_rs, which sums on the wire; expected bf16, "
                "fp16 or fp32, or the a2a back end"
            )
        return "a2a", f"{largest.dtype} cannot be summed on the wire"
    if backend != "auto":
        return ("a2a" if backend == "a2a" else "ag_rs"), "asked for"
    need_bytes = 2 * largest.total_bytes
    if need_bytes <= AUTO_A2A_BUFFERS_BYTES:
        return "a2a", f"its buffers take {need_bytes} bytes, within {AUTO_A2A_BUFFERS_BYTES}, and it sums in float32"
    return "ag_rs", f"a2a buffers would take {need_bytes} bytes, more than {AUTO_A2A_BUFFERS_BYTES}"


class Exchange(Protocol):
    """One back end: merges one tile of rows into `result` and `result_lse`."""

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        row_lens: torch.Tensor | None,
        result: torch.Tensor,
        result_lse: torch.Tensor,
    ) -> None: ...


class AllToAll:
    """Owns the send and the receive buffer; both are overwritten by the next merge."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        largest: A2ALayout,
        lse_base: LseBase,
        scale: float | None,
        device: torch.device,
    ) -> None:
        self._group = process_group
        self._largest = largest
        self._lse_base = lse_base
        self._scale = scale
        self._send = torch.empty(largest.total_bytes, dtype=torch.uint8, device=device)
        # One rank sends to itself alone: what it packed is what it would receive.
        self._recv = torch.empty_like(self._send) if largest.world > 1 else self._send
        self._layouts = {largest.batch: largest}

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        row_lens: torch.Tensor | None,
        result: torch.Tensor,
        result_lse: torch.Tensor,
    ) -> None:
        layout = self._layouts.get(len(out))
        if layout is None:
            most = self._largest
            layout = A2ALayout(most.world, len(out), most.heads, most.head_dim, most.dtype)
            self._layouts[len(out)] = layout
        pack_a2a(out, lse, self._send, layout, row_lens=row_lens)
        if layout.world > 1:
            num_bytes = layout.total_bytes
            dist.all_to_all_single(self._recv[:num_bytes], self._send[:num_bytes], group=self._group)
        unpack_combine(
            self._recv,
            layout,
            lse_base=self._lse_base,
            return_lse=True,
            out=result,
            lse_out=result_lse,
            scale=self._scale,
        )


class AllGatherReduceScatter:
    """Owns the LSEs of all ranks and the staging; all are overwritten by the next merge."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, largest: A2ALayout, lse_base: LseBase, device: torch.device
    ) -> None:
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        self._lse_base = lse_base
        world, heads, head_dim = largest.world, largest.heads, largest.head_dim
        self._rows_per_tile = max(1, min(largest.batch, STAGING_BYTES // (heads * largest.row_bytes)))
        self._staging = torch.empty(self._rows_per_tile * heads * head_dim, dtype=largest.dtype, device=device)
        self._own_lse = torch.empty(largest.batch * heads, dtype=torch.float32, device=device)
        self._all_lses = torch.empty(world * largest.batch * heads, dtype=torch.float32, device=device)
        self._world = world

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        row_lens: torch.Tensor | None,
        result: torch.Tensor,
        result_lse: torch.Tensor,
    ) -> None:
        batch, heads, head_dim = out.shape
        own_heads = heads // self._world
        own_lse = self._own_lse[: batch * heads]
        own_lse.view(batch, heads).copy_(lse)
        if row_lens is not None:
            mask_empty_(own_lse.view(batch, heads), row_lens)
        gathered = self._all_lses[: self._world * batch * heads]
        all_gather(gathered, own_lse, group=self._group)
        lses = gathered.view(self._world, batch, heads)
        for tile in tiles(batch, self._rows_per_tile):
            num_rows = tile.stop - tile.start
            staging = self._staging[: num_rows * heads * head_dim]
            scale_to_staging(
                out[tile],
                lses[:, tile],
                self._rank,
                staging.view(self._world, num_rows, own_heads, head_dim),
                lse_base=self._lse_base,
                # Every rank's LSE of these rows has been gathered: its own may give way to the merged one.
                lse_out=own_lse.view(batch, heads)[tile],
            )
            reduce_scatter(result[tile].view(-1), staging, group=self._group)
        first_head = self._rank * own_heads
        result_lse.copy_(own_lse.view(batch, heads)[:, first_head : first_head + own_heads])


def tiles(num_rows: int, rows_per_tile: int) -> Iterator[slice]:
    for first in range(0, num_rows, rows_per_tile):
        yield slice(first, min(first + rows_per_tile, num_rows))
