"""`kvxfer demo`: the KV cache of a real prompt moves from a prefill worker to N decode workers, byte for byte."""

from __future__ import annotations

import importlib.metadata
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import kvxfer
from kvxfer.cli import protocol
from kvxfer.cli.ensemble import Ensemble, Move, Pool, Setup
from kvxfer.cli.harness import Cast
from kvxfer.cli.output import Steps
from kvxfer.cli.pools import (
    SPARE_PAGES,
    GroupShape,
    Paging,
    count_raw_descriptors,
    cut_chunks,
    lay_out,
    page_tables,
    state_parts,
)
from kvxfer.errors import ConfigError
from kvxfer.layout import LayerRange, Placement, Shard
from kvxfer.ops.config import SlotConfig

NUM_LAYERS = 4
ROW_BYTES = 1152
PAGE_TOKENS = 64
INTERLEAVE = 1
CHUNK_TOKENS = 2048
MAX_PROMPT_BYTES = 32_768
SLOTS = SlotConfig(num_slots=8, slot_bytes=2 << 20)
_PREFILL_TIMEOUT_S = 600.0
_FILL = 0xA5
"""What a pool holds before the transfer; whatever is not owned must still hold it afterwards."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line of the demo."""

    prompt: Path | None
    num_ranks: int
    mode: Literal["packed", "raw"]
    transport: Literal["nixl", "loopback"]
    num_draft_layers: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one decode rank got."""

    rank: int
    num_rows: int
    num_bytes: int
    descriptors_raw: int
    descriptors_sent: int
    transfer_s: float
    problem: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found out."""

    options: DemoOptions
    num_tokens: int
    first_token: int
    prefill_s: float
    pair_s: float
    move: Move
    ranks: tuple[RankResult, ...]

    @property
    def verified(self) -> bool:
        return not any(rank.problem for rank in self.ranks)

    @property
    def num_bytes(self) -> int:
        return sum(rank.num_bytes for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The keys of `kvxfer demo --json`."""
        return {
            "transport": self.options.transport,
            "mode": self.options.mode,
            "ranks": self.options.num_ranks,
            "tokens": self.num_tokens,
            "layers": NUM_LAYERS,
            "draft_layers": self.options.num_draft_layers,
            "state_bytes": self.options.state_bytes,
            "bytes": self.num_bytes,
            "descriptors_raw": self.move.sent.num_runs,
            "descriptors_sent": self.move.sent.num_descriptors,
            "prefill_ms": self.prefill_s * 1e3,
            "pair_ms": self.pair_s * 1e3,
            "transfer_ms": self.move.elapsed_s * 1e3,
            "goodput_gb_s": self.num_bytes / self.move.elapsed_s / 1e9,
            "verified": self.verified,
            "per_rank": [
                {
                    "rank": rank.rank,
                    "rows": rank.num_rows,
                    "bytes": rank.num_bytes,
                    "descriptors_raw": rank.descriptors_raw,
                    "descriptors_sent": rank.descriptors_sent,
                    "transfer_ms": rank.transfer_s * 1e3,
                    "goodput_gb_s": rank.num_bytes / rank.transfer_s / 1e9,
                    "problem": rank.problem,
                }
                for rank in self.ranks
            ],
        }


class _Stage:
    """Shapes, pools and page tables of one demo: the facts that parent and workers share."""

    def __init__(self, options: DemoOptions, num_tokens: int) -> None:
        num_ranks = options.num_ranks
        shapes = [GroupShape("kv", LayerRange(0, NUM_LAYERS), ROW_BYTES, Placement.SHARDED)]
        if options.num_draft_layers:
            layers = LayerRange(NUM_LAYERS, NUM_LAYERS + options.num_draft_layers)
            shapes.append(GroupShape("draft", layers, ROW_BYTES, Placement.REPLICATED))
        if options.state_bytes:
            parts = state_parts(options.state_bytes, num_ranks)
            shapes.append(GroupShape("state", LayerRange(0, 1), options.state_bytes, Placement.STATE, parts))
        self.shapes = shapes
        self.num_tokens = num_tokens
        self.pagings = {
            shape.name: page_tables(shape.placement, 1, 1, num_ranks, 1, shuffled=True)
            if shape.placement is Placement.STATE
            else page_tables(shape.placement, num_tokens, PAGE_TOKENS, num_ranks, INTERLEAVE, shuffled=True)
            for shape in shapes
        }
        if "draft" in self.pagings:
            # A draft model shares the source's page table with the model, as engines do it.
            kv, draft = self.pagings["kv"], self.pagings["draft"]
            self.pagings["draft"] = Paging(draft.end_token, draft.page_tokens, kv.src_pages, draft.dst_pages)
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


def run_demo(options: DemoOptions, steps: Steps) -> DemoResult:
    """Run all processes of the demo, from start to end. Raises `KvxferError` where it cannot be run."""
    prompt = _read_prompt(options)
    stage = _Stage(options, len(prompt))
    with Cast() as cast:
        steps("starting agents and workers")
        prompt_path = cast.directory / "prompt"
        prompt_path.write_bytes(prompt)
        ensemble = Ensemble(cast, Setup(options.transport, options.mode, options.num_ranks, SLOTS, SLOTS))
        ensemble.hand_over(stage.src, stage.dst, _FILL)
        pair = ensemble.move(*_nothing(stage))
        prefilled = ensemble.prefill.ask(
            protocol.Prefill(
                prompt_path=str(prompt_path),
                directory=str(cast.directory),
                num_layers=NUM_LAYERS,
                num_draft_layers=options.num_draft_layers,
                num_heads=_num_heads(options.num_ranks),
                state_bytes=options.state_bytes,
                chunk_tokens=CHUNK_TOKENS,
                pages=stage.pagings["kv"].src_pages,
                state_page=stage.pagings["state"].src_pages[0] if options.state_bytes else 0,
            ),
            protocol.Prefilled,
            _PREFILL_TIMEOUT_S,
            lambda progress: steps(f"prefill: {progress.num_done} of {progress.num_total} tokens"),
        )
        steps("moving the KV cache")
        aux = prefilled.first_token.to_bytes(4, "little")
        move = ensemble.move(stage.chunks, stage.receive(), aux)
        steps("comparing every byte of every decode pool")
        problems = ensemble.verify(stage.expected(cast.directory))
        steps("stopping")
    ranks = tuple(_rank_result(options, stage, move, rank, problem) for rank, problem in enumerate(problems))
    return DemoResult(options, len(prompt), prefilled.first_token, prefilled.elapsed_s, pair.elapsed_s, move, ranks)


def _rank_result(options: DemoOptions, stage: _Stage, move: Move, rank: int, problem: str) -> RankResult:
    stats = move.landed[rank]
    src, dst = stage.src.layout, stage.dst[rank].layout
    descriptors_raw = count_raw_descriptors(src, dst, stage.pagings, stage.chunks, SLOTS.slot_bytes)
    return RankResult(
        rank=rank,
        num_rows=stats.num_rows,
        num_bytes=stats.num_bytes,
        descriptors_raw=descriptors_raw,
        descriptors_sent=descriptors_raw if options.mode == "raw" else stats.num_segments,
        transfer_s=move.landed_s[rank],
        problem=problem,
    )


def _nothing(stage: _Stage) -> tuple[list[protocol.Chunk], list[dict[str, protocol.PageList]]]:
    """A transfer of no rows: it makes the agents pair, which happens once and is not part of a transfer's time."""
    groups = {name: protocol.PageList(first_token=0, end_token=0, pages=[]) for name in stage.pagings}
    return [protocol.Chunk(groups=groups, last=True)], [groups] * len(stage.dst)


def _num_heads(num_ranks: int) -> int:
    """At least four, and as many for each rank."""
    return next(num_heads for num_heads in itertools.count(4) if num_heads % num_ranks == 0)


def _read_prompt(options: DemoOptions) -> bytes:
    if options.prompt is None:
        return _own_readme().encode()[:MAX_PROMPT_BYTES]
    try:
        prompt = options.prompt.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompt: {options.prompt} cannot be read: {error.strerror}") from error
    if len(prompt) > MAX_PROMPT_BYTES:
        raise ConfigError(
            f"--prompt: got {len(prompt)} bytes, expected at most {MAX_PROMPT_BYTES}: the model runs on the CPU, "
            "one token a byte"
        )
    return prompt


def _own_readme() -> str:
    """README.md of the source tree, or the description that an installed package carries."""
    path = Path(kvxfer.__path__[0]).parent / "README.md"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    metadata = importlib.metadata.distribution("kvxfer").read_text("METADATA") or ""
    return metadata.partition("\n\n")[2]  # headers, an empty line, the README
