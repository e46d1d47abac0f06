"""`kvxfer bench transfer`: the whole path between processes, beside one contiguous write of the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvxfer.cli import protocol
from kvxfer.cli.ensemble import Ensemble, Move, Pool, Setup
from kvxfer.cli.harness import Cast, Child
from kvxfer.cli.output import Steps
from kvxfer.cli.pools import SPARE_PAGES, GroupShape, Paging, cut_chunks, lay_out, page_tables
from kvxfer.control.messages import TransferStats
from kvxfer.errors import ConfigError
from kvxfer.layout import LayerRange, Placement, Shard
from kvxfer.ops.config import SlotConfig, TransferMode, TransportName
from kvxfer.ownership import local_len

NUM_SLOTS, SLOT_BYTES = 4, 16 << 20
"""64 MiB in few large slots: on one host a segment costs processor time, and more in flight gain nothing."""
MAX_RANKS = 16
MAX_MEMORY_SHARE = 0.6
"""Of what is available: workers also take copies while they fill and compare pools, and others use the machine."""
_YARDSTICK_TIMEOUT_S = 180.0
_SEED = 1


@dataclass(frozen=True, slots=True)
class TransferCase:
    """The command line of the bench."""

    transport: TransportName
    mode: TransferMode
    num_tokens: int
    num_layers: int
    row_bytes: int
    page_tokens: int
    pages: Literal["shuffled", "adjacent"]
    num_ranks: int
    interleave: int
    chunk_tokens: int
    num_repeats: int
    num_slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES

    def check(self) -> None:
        """Raise `ConfigError` for values that make no bench."""
        minimum = {"tokens": (self.num_tokens, 0), "layers": (self.num_layers, 1), "row-bytes": (self.row_bytes, 1)}
        minimum |= {"page": (self.page_tokens, 1), "dcp": (self.num_ranks, 1), "interleave": (self.interleave, 1)}
        minimum |= {"chunk": (self.chunk_tokens, 1), "repeat": (self.num_repeats, 1)}
        for name, (got, least) in minimum.items():
            if got < least:
                raise ConfigError(f"--{name}: got {got}, expected at least {least}")
        if not 1 <= self.num_slots <= 4096 or self.slot_bytes < 4096:
            raise ConfigError(
                f"--num-slots, --slot-kib: got {self.num_slots} slots of {self.slot_bytes >> 10} KiB, "
                "expected 1 to 4096 of at least 4 KiB"
            )
        if self.row_bytes > self.slot_bytes:
            raise ConfigError(f"--row-bytes: got {self.row_bytes}, expected at most a slot, {self.slot_bytes}")
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(f"--dcp: got {self.num_ranks}, expected at most {MAX_RANKS}: each rank is two processes")

    def check_memory(self, available_bytes: int) -> None:
        """Raise `ConfigError` where the run would take more than `MAX_MEMORY_SHARE` of `available_bytes`."""
        src_slots, dst_slots = self.slots()
        slot_bytes = src_slots.num_slots * src_slots.slot_bytes
        slot_bytes += self.num_ranks * dst_slots.num_slots * dst_slots.slot_bytes
        # The KV lies in the source pool, split over the decode pools, and at both ends of the yardstick.
        needed_bytes = 4 * self.num_bytes + slot_bytes
        limit_bytes = int(available_bytes * MAX_MEMORY_SHARE)
        if needed_bytes > limit_bytes:
            raise ConfigError(
                f"--tokens, --layers, --row-bytes: got pools and slots of {needed_bytes >> 20} MiB in all, expected at "
                f"most {limit_bytes >> 20} MiB, {MAX_MEMORY_SHARE:.0%} of the memory that is available"
            )

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.num_layers * self.row_bytes

    def slots(self) -> tuple[SlotConfig, SlotConfig]:
        """Slots of the prefill agent and of each decode agent.

        `serial` packs the whole chunk of a rank into one slot before it sends anything: its slots grow with the chunk,
        and the sender needs one for each rank.
        """
        if self.mode != "serial":
            slots = SlotConfig(num_slots=self.num_slots, slot_bytes=self.slot_bytes)
            return slots, slots
        num_rows = max(
            local_len(shard, min(first + self.chunk_tokens, self.num_tokens)) - local_len(shard, first)
            for shard in (Shard(rank, self.num_ranks, self.interleave) for rank in range(self.num_ranks))
            for first in range(0, max(self.num_tokens, 1), self.chunk_tokens)
        )
        slot_bytes = max(self.slot_bytes, -(-num_rows * self.num_layers * self.row_bytes // 4096) * 4096)
        return SlotConfig(num_slots=self.num_ranks, slot_bytes=slot_bytes), SlotConfig(
            num_slots=1, slot_bytes=slot_bytes
        )


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Medians over the repeats. `contiguous_s` is the yardstick, None where there are no bytes to move."""

    case: TransferCase
    pair_s: float
    moves: tuple[Move, ...]
    contiguous_s: float | None
    path: str
    problems: tuple[str, ...]

    @property
    def elapsed_s(self) -> float:
        return statistics.median(move.elapsed_s for move in self.moves)

    def as_json(self) -> dict[str, Any]:
        """The keys of `kvxfer bench transfer --json`. Times of stages are sums over the agents and overlap."""
        case = self.case
        goodput_gb_s = case.num_bytes / self.elapsed_s / 1e9
        contiguous_gb_s = case.num_bytes / self.contiguous_s / 1e9 if self.contiguous_s else None
        src_slots, dst_slots = case.slots()
        last = self.moves[-1].sent
        return {
            "transport": case.transport,
            "path": self.path,
            "mode": case.mode,
            "tokens": case.num_tokens,
            "layers": case.num_layers,
            "row_bytes": case.row_bytes,
            "page": case.page_tokens,
            "pages": case.pages,
            "dcp": case.num_ranks,
            "interleave": case.interleave,
            "chunk": case.chunk_tokens,
            "repeat": case.num_repeats,
            "bytes": case.num_bytes,
            "pair_ms": self.pair_s * 1e3,
            "transfer_ms": self.elapsed_s * 1e3,
            "goodput_gb_s": goodput_gb_s,
            "contiguous_gb_s": contiguous_gb_s,
            "efficiency": goodput_gb_s / contiguous_gb_s if contiguous_gb_s else None,
            "descriptors_raw": last.num_runs,
            "descriptors_sent": last.num_descriptors,
            "plan_ms": self._stage_ms(lambda stats: stats.plan_s, sending=True),
            "pack_ms": self._stage_ms(lambda stats: stats.pack_s, sending=True),
            "send_ms": self._stage_ms(lambda stats: stats.send_s, sending=True),
            "scatter_ms": self._stage_ms(lambda stats: stats.scatter_s, sending=False),
            "slot_bytes": max(slots.num_slots * slots.slot_bytes for slots in (src_slots, dst_slots)),
            "verified": not self.problems,
            "problems": list(self.problems),
        }

    def _stage_ms(self, stage_s: Callable[[TransferStats], float], *, sending: bool) -> float:
        sums = [sum(map(stage_s, (move.sent,) if sending else move.landed)) for move in self.moves]
        return statistics.median(sums) * 1e3


def run_case(case: TransferCase, steps: Steps) -> TransferResult:
    """Run one case, which was checked, in processes of its own. Raises `KvxferError` where it cannot be run."""
    shuffled = case.pages == "shuffled"
    paging = page_tables(
        Placement.SHARDED, case.num_tokens, case.page_tokens, case.num_ranks, case.interleave, shuffled
    )
    with Cast() as cast:
        steps(f"{case.mode}: starting agents and workers")
        ensemble = Ensemble(cast, Setup(case.transport, case.mode, case.num_ranks, *case.slots()))
        yardstick = _Yardstick(cast, case) if case.num_bytes else None
        ensemble.hand_over(_pool(case, paging.src_pages, Shard()), _dst_pools(case, paging), fill=0)
        rows = protocol.PatternRows(
            seed=_SEED, num_layers=case.num_layers, num_tokens=case.num_tokens, row_bytes=case.row_bytes
        )
        ensemble.prefill.ask(
            protocol.FillRows(group="kv", rows=rows, pages=paging.src_pages), protocol.Done, _YARDSTICK_TIMEOUT_S
        )
        nothing = paging.none_of_it()
        pair = ensemble.move(cut_chunks({"kv": nothing}, frozenset(), 0, 1), _receive(nothing))
        return _measure(case, ensemble, yardstick, paging, rows, pair, steps)


def available_bytes() -> int:
    """Memory that processes can get without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _measure(
    case: TransferCase,
    ensemble: Ensemble,
    yardstick: _Yardstick | None,
    paging: Paging,
    rows: protocol.PatternRows,
    pair: Move,
    steps: Steps,
) -> TransferResult:
    chunks = cut_chunks({"kv": paging}, frozenset(), case.num_tokens, case.chunk_tokens)
    expected = [{"kv": protocol.Expected(pages=groups["kv"], source=rows)} for groups in _receive(paging)]
    moves: list[Move] = []
    contiguous_s: list[float] = []
    problems: list[str] = []
    for repeat in range(case.num_repeats + 1):  # the first one warms up
        steps(f"{case.mode}: repeat {repeat} of {case.num_repeats}")
        fill = 1 + repeat % 255
        ensemble.refill(fill)
        moves.append(ensemble.move(chunks, _receive(paging)))
        if yardstick is not None:
            contiguous_s.append(yardstick.write_once())
        found = ensemble.verify(expected)
        problems += [f"repeat {repeat}, rank {rank}: {each}" for rank, each in enumerate(found) if each]
    path = yardstick.path if yardstick is not None else ""
    if yardstick is not None:
        problems += yardstick.check()
    return TransferResult(
        case,
        pair.elapsed_s,
        tuple(moves[1:]),
        statistics.median(contiguous_s[1:]) if contiguous_s else None,
        path,
        tuple(problems),
    )


def _pool(case: TransferCase, pages: list[int], shard: Shard) -> Pool:
    shape = GroupShape("kv", LayerRange(0, case.num_layers), case.row_bytes, Placement.SHARDED)
    return Pool(*lay_out([shape], {"kv": len(pages) + SPARE_PAGES}, case.page_tokens, shard, "bytes"))


def _dst_pools(case: TransferCase, paging: Paging) -> list[Pool]:
    return [
        _pool(case, pages, Shard(rank, case.num_ranks, case.interleave)) for rank, pages in enumerate(paging.dst_pages)
    ]


def _receive(paging: Paging) -> list[dict[str, protocol.PageList]]:
    return [{"kv": paging.receive(rank)} for rank in range(len(paging.dst_pages))]


class _Yardstick:
    """Two processes with nothing but the engine: one write of the case's bytes, one descriptor."""

    _FILL = 0x5C

    def __init__(self, cast: Cast, case: TransferCase) -> None:
        self._writer = cast.start_worker("yardstick-writer", "kvxfer.cli.yardstick")
        self._target = cast.start_worker("yardstick-target", "kvxfer.cli.yardstick")
        self.path = ""
        self._open(self._writer, case, self._FILL)
        self._target_region = self._open(self._target, case, 0)

    def _open(self, worker: Child, case: TransferCase, fill: int) -> protocol.EngineOpen:
        command = protocol.OpenEngine(transport=case.transport, num_bytes=case.num_bytes, fill=fill)
        return worker.ask(command, protocol.EngineOpen, _YARDSTICK_TIMEOUT_S)

    def write_once(self) -> float:
        """Seconds of one write."""
        written = self._writer.ask(
            protocol.WriteOnce(target=self._target_region), protocol.Written, _YARDSTICK_TIMEOUT_S
        )
        self.path = written.path
        return written.elapsed_s

    def check(self) -> list[str]:
        """What is wrong with the bytes that arrived; nothing if all are right."""
        problem = self._target.ask(protocol.CheckFill(fill=self._FILL), protocol.Verified, _YARDSTICK_TIMEOUT_S).problem
        return [problem] if problem else []
