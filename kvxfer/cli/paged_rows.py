"""Rows of the demo's model in a paged pool."""

from __future__ import annotations

import torch

from kvxfer.cli.demo_model import ROW_DIM
from kvxfer.layout import Group
from kvxfer.memory import HostMemory


class PagedRows:
    """The rows of one group in a pool, `[num_layers, num_pages, page_tokens, ROW_DIM]` bf16, and a page table."""

    def __init__(self, memory: HostMemory, group: Group, pages: list[int]) -> None:
        """`pages` hold the sequence's tokens in order. The view ends with this object."""
        values = torch.from_numpy(memory.array[: memory.num_bytes // 2 * 2]).view(torch.bfloat16)
        strides = (group.layer_stride_bytes, group.page_stride_bytes, group.row_stride_bytes, 2)
        self.rows = values.as_strided(
            (group.layers.num_layers, group.num_pages, group.page_tokens, ROW_DIM),
            tuple(stride // 2 for stride in strides),
            group.base_offset_bytes // 2,
        )
        self.pages = torch.tensor(pages, dtype=torch.int64)
        self.page_tokens = group.page_tokens

    def write(self, layer_idx: int, first_row: int, rows: torch.Tensor) -> None:
        """Store `rows` `[n, ROW_DIM]` as rows `first_row` and on."""
        indices = torch.arange(first_row, first_row + len(rows))
        self.rows[layer_idx, self.pages[indices // self.page_tokens], indices % self.page_tokens] = rows

    def read(self, layer_idx: int, num_rows: int) -> torch.Tensor:
        """The first `num_rows` rows: `[num_rows, ROW_DIM]`."""
        num_pages = -(-num_rows // self.page_tokens)
        return self.rows[layer_idx, self.pages[:num_pages]].reshape(-1, ROW_DIM)[:num_rows]
