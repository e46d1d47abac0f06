"""The wire of one chunk: blocks of equal rows one behind the other, cut into segments of at most a slot.

Cutting is closed form: a block's rows are alike, so a segment's share of it follows by arithmetic, and the pieces of a
segment are made only when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvxfer.errors import ContractError, LayoutError
from kvxfer.layout import LayerRange
from kvxfer.ownership import Int64Array


def _no_tokens() -> Int64Array:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of equal size of one group, in wire order: layer by layer, `num_rows` rows each.

    Sharded and replicated groups: row `i` is token `tokens[i]` (`[num_rows]` int64, ascending). State: row `i` is the
    `row_bytes` bytes from `first_byte + i * row_bytes` of the local blob, where the first byte differs by side.
    """

    group_idx: int  # position in `Route.groups`
    layers: LayerRange
    row_bytes: int
    num_rows: int  # in one layer
    tokens: Int64Array = field(default_factory=_no_tokens)
    src_first_byte: int = 0
    dst_first_byte: int = 0

    @property
    def num_wire_rows(self) -> int:
        """Rows of all layers."""
        return self.layers.num_layers * self.num_rows


class Piece(NamedTuple):
    """Rows `[first_row, end_row)` of a block in one global layer, at `slot_offset_bytes` of the segment's slot.

    A tuple: a segment may have dozens, and they become arrays.
    """

    block_idx: int
    layer: int
    first_row: int
    end_row: int
    slot_offset_bytes: int


@dataclass(frozen=True, slots=True)
class BlockCut:
    """Where a block's wire rows fall: `head_rows` into segment `first_segment`, then `segment_rows` into each next."""

    first_segment: int
    end_segment: int
    head_rows: int
    segment_rows: int
    slot_offset_bytes: int  # of the head within its segment
    wire_offset_bytes: int  # of the block within the chunk's wire

    def rows_in(self, segment_idx: int, num_wire_rows: int) -> tuple[int, int]:
        """The block's wire rows `[first, end)` in one of its segments."""
        if segment_idx == self.first_segment:
            return 0, self.head_rows
        first = self.head_rows + (segment_idx - self.first_segment - 1) * self.segment_rows
        return first, min(first + self.segment_rows, num_wire_rows)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """The wire of one chunk over one leg. Both sides compute the same plan; neither sends it."""

    blocks: tuple[Block, ...]
    cuts: tuple[BlockCut, ...]  # one for each block
    num_bytes: int
    num_rows: int
    num_segments: int

    def segment_range(self, segment_idx: int) -> tuple[int, int]:
        """The bytes `[first, end)` of the chunk's wire that the segment carries; raises `ContractError`."""
        if len(self.blocks) == 1 and 0 <= segment_idx < self.num_segments:  # nearly always, and asked for each segment
            block = self.blocks[0]
            first_row, end_row = self.cuts[0].rows_in(segment_idx, block.num_wire_rows)
            return first_row * block.row_bytes, end_row * block.row_bytes
        shares = list(self._shares(segment_idx))
        first_idx, first_row, _ = shares[0]
        end_idx, _, end_row = shares[-1]
        return (
            self.cuts[first_idx].wire_offset_bytes + first_row * self.blocks[first_idx].row_bytes,
            self.cuts[end_idx].wire_offset_bytes + end_row * self.blocks[end_idx].row_bytes,
        )

    def pieces(self, segment_idx: int) -> list[Piece]:
        """The segment's rows, one piece for each block and layer, in wire order; raises `ContractError`."""
        pieces = []
        for block_idx, wire_row, end_wire_row in self._shares(segment_idx):
            block, cut = self.blocks[block_idx], self.cuts[block_idx]
            slot_offset_bytes = cut.slot_offset_bytes if segment_idx == cut.first_segment else 0
            while wire_row < end_wire_row:
                layer_idx, first_row = divmod(wire_row, block.num_rows)
                end_row = min(block.num_rows, first_row + end_wire_row - wire_row)
                pieces.append(Piece(block_idx, block.layers.first + layer_idx, first_row, end_row, slot_offset_bytes))
                slot_offset_bytes += (end_row - first_row) * block.row_bytes
                wire_row += end_row - first_row
        return pieces

    def _shares(self, segment_idx: int) -> Iterator[tuple[int, int, int]]:
        """Each block of the segment with its wire rows: (block_idx, first, end)."""
        if not 0 <= segment_idx < self.num_segments:
            raise ContractError(f"segment_idx: got {segment_idx}, expected below num_segments {self.num_segments}")
        for block_idx, cut in enumerate(self.cuts):
            if cut.first_segment <= segment_idx < cut.end_segment:
                yield block_idx, *cut.rows_in(segment_idx, self.blocks[block_idx].num_wire_rows)


def cut_blocks(blocks: tuple[Block, ...], segment_bytes: int) -> ChunkPlan:
    """Cut the blocks' wire greedily, at row boundaries, into segments of at most `segment_bytes`.

    Blocks must have rows. Raises `LayoutError` where one row is larger than a segment.
    """
    cuts = []
    segment_idx = used_bytes = wire_bytes = num_rows = 0
    for block in blocks:
        segment_rows = segment_bytes // block.row_bytes
        if segment_rows == 0:
            raise LayoutError(
                f"segment_bytes: got {segment_bytes}, expected at least a row of {block.row_bytes} bytes: "
                "use larger slots"
            )
        head_rows = min(block.num_wire_rows, (segment_bytes - used_bytes) // block.row_bytes)
        if head_rows == 0:  # not even one row fits behind the previous block
            segment_idx, used_bytes = segment_idx + 1, 0
            head_rows = min(block.num_wire_rows, segment_rows)
        num_more_segments = -(-(block.num_wire_rows - head_rows) // segment_rows)
        end_segment = segment_idx + 1 + num_more_segments
        cuts.append(BlockCut(segment_idx, end_segment, head_rows, segment_rows, used_bytes, wire_bytes))
        if num_more_segments:
            last_rows = block.num_wire_rows - head_rows - (num_more_segments - 1) * segment_rows
            segment_idx, used_bytes = end_segment - 1, last_rows * block.row_bytes
        else:
            used_bytes += head_rows * block.row_bytes
        wire_bytes += block.num_wire_rows * block.row_bytes
        num_rows += block.num_wire_rows
    return ChunkPlan(blocks, tuple(cuts), wire_bytes, num_rows, segment_idx + 1 if blocks else 0)
