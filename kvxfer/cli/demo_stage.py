"""The demo's model, pools and page tables: the facts that its processes share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from kvxfer.cli import protocol
from kvxfer.cli.ensemble import Pool
from kvxfer.cli.pools import SPARE_PAGES, GroupShape, Paging, cut_chunks, lay_out, page_tables, state_parts
from kvxfer.layout import LayerRange, Placement, Shard
from kvxfer.ops.config import TransferMode, TransportName

NUM_LAYERS = 4
ROW_BYTES = 1152
PAGE_TOKENS = 64
INTERLEAVE = 1
CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line of the demo."""

    prompt: Path | None
    num_ranks: int
    mode: TransferMode
    transport: TransportName
    num_draft_layers: int
    state_bytes: int
    num_decode_steps: int


class Stage:
    """Shapes, pools and page tables of one demo: the facts that parent and workers share."""

    def __init__(self, options: DemoOptions, num_tokens: int) -> None:
        """Lay everything out; nothing is allocated here."""
        num_ranks = options.num_ranks
        self.options = options
        # At least four heads, and as many for each rank.
        self.num_heads = next(num_heads for num_heads in itertools.count(4) if num_heads % num_ranks == 0)
        shapes = [GroupShape("kv", LayerRange(0, NUM_LAYERS), ROW_BYTES, Placement.SHARDED)]
        if options.num_draft_layers:
            layers = LayerRange(NUM_LAYERS, NUM_LAYERS + options.num_draft_layers)
            shapes.append(GroupShape("draft", layers, ROW_BYTES, Placement.REPLICATED))
        if options.state_bytes:
            parts = state_parts(options.state_bytes, num_ranks)
            shapes.append(GroupShape("state", LayerRange(0, 1), options.state_bytes, Placement.STATE, parts))
        self.shapes = shapes
        self.num_tokens = num_tokens
        self.pagings = {shape.name: _pages_of(shape, options, num_tokens) for shape in shapes}
        if options.num_draft_layers:
            # The draft model shares the model's page table at the source, as engines do it.
            self.pagings["draft"] = replace(self.pagings["draft"], src_pages=self.pagings["kv"].src_pages)
        self.chunks = cut_chunks(self.pagings, frozenset({"state"}) & self.pagings.keys(), num_tokens, CHUNK_TOKENS)
        self.src = self._pool({name: paging.src_pages for name, paging in self.pagings.items()}, Shard())
        self.dst = [
            self._pool(
                {name: paging.dst_pages[rank] for name, paging in self.pagings.items()},
                Shard(rank, num_ranks, INTERLEAVE),
            )
            for rank in range(num_ranks)
        ]

    def _pool(self, pages: dict[str, list[int]], shard: Shard) -> Pool:
        num_pages = {name: len(ids) + SPARE_PAGES for name, ids in pages.items()}
        return Pool(*lay_out(self.shapes, num_pages, PAGE_TOKENS, shard, "bf16"))

    def receive(self) -> list[dict[str, protocol.PageList]]:
        """What each rank opens."""
        return [{name: paging.receive(rank) for name, paging in self.pagings.items()} for rank in range(len(self.dst))]

    def pairing(self) -> tuple[list[protocol.Chunk], list[dict[str, protocol.PageList]]]:
        """A transfer of no rows."""
        none = {name: paging.none_of_it().receive(0) for name, paging in self.pagings.items()}
        return [protocol.Chunk(groups=none, last=True)], [none] * len(self.dst)

    def prefill(self, directory: Path) -> protocol.Prefill:
        """The prefill worker's order; the prompt lies in `directory`, and its side files go there."""
        return protocol.Prefill(
            prompt_path=str(directory / "prompt"),
            directory=str(directory),
            num_layers=NUM_LAYERS,
            num_draft_layers=self.options.num_draft_layers,
            num_heads=self.num_heads,
            state_bytes=self.options.state_bytes,
            chunk_tokens=CHUNK_TOKENS,
            pages=self.pagings["kv"].src_pages,
            state_page=self.pagings["state"].src_pages[0] if self.options.state_bytes else 0,
        )

    def decode_alone(self) -> protocol.DecodeAlone:
        """The prefill worker's order to decode as well."""
        return protocol.DecodeAlone(num_tokens=self.num_tokens, num_steps=self.options.num_decode_steps)

    def decode_shared(self, rank: int, directory: Path) -> protocol.DecodeShared:
        """A decode rank's order; the ranks find each other by a file in `directory`."""
        return protocol.DecodeShared(
            store_path=str(directory / "ranks"),
            rank=rank,
            num_ranks=self.options.num_ranks,
            interleave=INTERLEAVE,
            num_layers=NUM_LAYERS,
            num_draft_layers=self.options.num_draft_layers,
            num_heads=self.num_heads,
            num_tokens=self.num_tokens,
            num_steps=self.options.num_decode_steps,
            pages=self.pagings["kv"].dst_pages[rank],
        )

    def expected(self, directory: Path) -> list[dict[str, protocol.Expected]]:
        """What each rank must hold: the rows in the prefill worker's side files."""
        sources = {
            shape.name: protocol.FileRows(
                path=str(directory / f"{shape.name}.rows"),
                num_layers=shape.layers.num_layers,
                num_tokens=self.pagings[shape.name].end_token,
                row_bytes=shape.row_bytes,
            )
            for shape in self.shapes
        }
        return [
            {name: protocol.Expected(pages=pages, source=sources[name]) for name, pages in groups.items()}
            for groups in self.receive()
        ]


def _pages_of(shape: GroupShape, options: DemoOptions, num_tokens: int) -> Paging:
    if shape.placement is Placement.STATE:
        return page_tables(shape.placement, 1, 1, options.num_ranks, 1, shuffled=True)
    return page_tables(
        shape.placement,
        num_tokens,
        PAGE_TOKENS,
        options.num_ranks,
        INTERLEAVE,
        shuffled=True,
        num_later=options.num_decode_steps,
    )
