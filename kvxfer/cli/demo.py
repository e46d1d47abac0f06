"""`kvxfer demo`: the KV cache of a real prompt moves from a prefill worker to N decode workers, byte for byte."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvxfer
from kvxfer.cli import protocol
from kvxfer.cli.demo_stage import NUM_LAYERS, DemoOptions, Stage
from kvxfer.cli.ensemble import Ensemble, Move, Setup
from kvxfer.cli.harness import Cast
from kvxfer.cli.output import Steps
from kvxfer.cli.pools import count_raw_descriptors
from kvxfer.control.messages import TransferStats
from kvxfer.errors import ConfigError
from kvxfer.ops.config import SlotConfig

MAX_PROMPT_BYTES = 16_384
SLOTS = SlotConfig(num_slots=8, slot_bytes=2 << 20)
_MODEL_TIMEOUT_S = 600.0
_FILL = 0xA5
"""What a pool holds before the transfer; whatever is not owned must still hold it afterwards."""


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
class DecodeResult:
    """Tokens of one process that holds everything, and of each decode rank; the first is prefill's."""

    alone: list[int]
    shared: tuple[list[int], ...]
    elapsed_s: float

    @property
    def tokens_match(self) -> bool:
        return all(tokens == self.alone for tokens in self.shared)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found out."""

    options: DemoOptions
    num_tokens: int
    prefill_s: float
    pair_s: float
    move: Move
    ranks: tuple[RankResult, ...]
    decoded: DecodeResult | None
    """None without decode steps."""

    @property
    def is_right(self) -> bool:
        """Whether every byte, and every decoded token, is what it must be."""
        return self.verified and (self.decoded is None or self.decoded.tokens_match)

    @property
    def verified(self) -> bool:
        return not any(rank.problem for rank in self.ranks)

    @property
    def num_bytes(self) -> int:
        return sum(rank.num_bytes for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The keys of `kvxfer demo --json`."""
        decoded: dict[str, Any] = {}
        if self.decoded is not None:
            decoded = {
                "decode_steps": self.options.num_decode_steps,
                "tokens_match": self.decoded.tokens_match,
                "tokens_alone": self.decoded.alone,
                "tokens_per_rank": list(self.decoded.shared),
                "decode_ms": self.decoded.elapsed_s * 1e3,
            }
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
            **decoded,
        }


def run_demo(options: DemoOptions, steps: Steps) -> DemoResult:
    """Run all processes of the demo, from start to end. Raises `KvxferError` where it cannot be run."""
    prompt = _read_prompt(options)
    stage = Stage(options, len(prompt))
    with Cast() as cast:
        steps("starting agents and workers")
        (cast.directory / "prompt").write_bytes(prompt)
        ensemble = Ensemble(cast, Setup(options.transport, options.mode, options.num_ranks, SLOTS, SLOTS))
        ensemble.hand_over(stage.src, stage.dst, _FILL)
        pair = ensemble.move(*stage.pairing())
        prefilled = ensemble.prefill.ask(
            stage.prefill(cast.directory),
            protocol.Prefilled,
            _MODEL_TIMEOUT_S,
            lambda progress: steps(f"prefill: {progress.num_done} of {progress.num_total} tokens"),
        )
        steps("moving the KV cache")
        move = ensemble.move(stage.chunks, stage.receive(), prefilled.first_token.to_bytes(4, "little"))
        steps("comparing every byte of every decode pool")
        problems = ensemble.verify(stage.expected(cast.directory))
        decoded = _decode(ensemble, stage, cast.directory, steps) if options.num_decode_steps else None
        steps("stopping")
    return DemoResult(
        options=options,
        num_tokens=len(prompt),
        prefill_s=prefilled.elapsed_s,
        pair_s=pair.elapsed_s,
        move=move,
        ranks=tuple(_rank_result(stage, move, rank, problem) for rank, problem in enumerate(problems)),
        decoded=decoded,
    )


def _decode(ensemble: Ensemble, stage: Stage, directory: Path, steps: Steps) -> DecodeResult:
    steps("decoding alone")
    alone = ensemble.prefill.ask(stage.decode_alone(), protocol.Decoded, _MODEL_TIMEOUT_S)
    steps("decoding over all ranks")
    for rank, worker in enumerate(ensemble.decode):
        worker.send(stage.decode_shared(rank, directory))
    shared = [worker.receive(protocol.Decoded, _MODEL_TIMEOUT_S) for worker in ensemble.decode]
    return DecodeResult(alone.tokens, tuple(each.tokens for each in shared), max(each.elapsed_s for each in shared))


def _rank_result(stage: Stage, move: Move, rank: int, problem: str) -> RankResult:
    stats = move.landed[rank]
    src, dst = stage.src.layout, stage.dst[rank].layout
    descriptors_raw = count_raw_descriptors(src, dst, stage.pagings, stage.chunks, SLOTS.slot_bytes)
    return RankResult(
        rank=rank,
        num_rows=stats.num_rows,
        num_bytes=stats.num_bytes,
        descriptors_raw=descriptors_raw,
        descriptors_sent=_descriptors_sent(move, descriptors_raw, stats),
        transfer_s=move.landed_s[rank],
        problem=problem,
    )


def _descriptors_sent(move: Move, descriptors_raw: int, stats: TransferStats) -> int:
    """Those of one rank. Mode auto chooses for all ranks alike: their pools and paths are."""
    if move.sent.num_descriptors == 0:
        return 0  # the rank has pulled its rows
    return descriptors_raw if move.sent.num_descriptors == move.sent.num_runs else stats.num_segments


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
