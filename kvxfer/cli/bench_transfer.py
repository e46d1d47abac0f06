"""`kvxfer bench transfer`: the whole path between processes, beside one contiguous write of the same bytes."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvxfer.cli import protocol
from kvxfer.cli.bench_stage import CopyYardstick, Stage, Yardstick
from kvxfer.cli.ensemble import Ensemble, Move, Pace, Pool
from kvxfer.cli.harness import Cast
from kvxfer.cli.output import Steps
from kvxfer.cli.pools import SPARE_PAGES, GroupShape, Paging, cut_chunks, lay_out, page_tables
from kvxfer.cli.timeline import draw_timeline, read_spans
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.control.messages import TransferStats
from kvxfer.layout import LayerRange, Placement, Shard

_FILL_TIMEOUT_S = 180.0
_SEED = 1
_FILL = 1
"""What decode pools hold before each transfer, and after it wherever no row belongs."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Medians over the repeats. `contiguous_s` is the yardstick, None where the case has none; `alone_per_s` are
    products a second of a worker that computes and moves nothing."""

    case: TransferCase
    pair_s: float
    moves: tuple[Move, ...]
    contiguous_s: float | None
    path: str
    problems: tuple[str, ...]
    alone_per_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        return self._median(lambda move: move.elapsed_s)

    @property
    def tail_s(self) -> float:
        """From the last submit to the last `landed`."""
        return self._median(lambda move: move.tail_s)

    @property
    def share_of_wire(self) -> float | None:
        """Bytes / rate of the emulated wire / elapsed; None without one."""
        if self.case.wire_gb_s is None:
            return None
        return self.case.num_bytes / (self.case.wire_gb_s * 1e9) / self.elapsed_s

    @property
    def rate_kept(self) -> float | None:
        """Share of its products that a worker which computes meanwhile keeps; None for one that does not."""
        if self.alone_per_s is None:
            return None
        return self._median(lambda move: move.products_per_s) / self.alone_per_s

    def as_json(self) -> dict[str, Any]:
        """The keys of `kvxfer bench transfer --json`. Times of stages are sums over the agents and overlap."""
        case = self.case
        goodput_gb_s = case.num_bytes / self.elapsed_s / 1e9
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
            "contiguous_gb_s": case.num_bytes / self.contiguous_s / 1e9 if self.contiguous_s else None,
            "efficiency": self.contiguous_s / self.elapsed_s if self.contiguous_s else None,
            "descriptors_raw": last.num_runs,
            "descriptors_sent": last.num_descriptors,
            "plan_ms": self._stage_ms(lambda stats: stats.plan_s, sending=True),
            "pack_ms": self._stage_ms(lambda stats: stats.pack_s, sending=True),
            "send_ms": self._stage_ms(lambda stats: stats.send_s, sending=True),
            "scatter_ms": self._stage_ms(lambda stats: stats.scatter_s, sending=False),
            "device": case.device,
            "gpus": case.num_gpus,
            "placement": case.placement,
            "busy": case.busy,
            "verify": case.verify,
            "interval_ms": case.interval_s * 1e3,
            "opens_first": case.opens_first,
            "wire_gb_s": case.wire_gb_s,
            "descriptor_us": case.descriptor_us,
            "share_of_wire": self.share_of_wire,
            "exposed_tail_ms": self.tail_s * 1e3,
            "segments": last.num_segments,
            "worker_us_per_segment": self._us_per_segment(lambda move: move.client_cpu_s),
            "decode_worker_us_per_segment": self._us_per_segment(lambda move: sum(move.decode_client_cpu_s)),
            "agent_us_per_segment": self._us_per_segment(lambda move: sum(time.main_s for time in move.agent_cpu[:1])),
            "worker_rate_kept": self.rate_kept,
            "peak_device_bytes": max(move.device_bytes for move in self.moves),
            "slots": case.slot_kind,
            "slot_bytes": max(slots.num_slots * slots.slot_bytes for slots in case.slots()),
            "verified": not self.problems,
            "problems": list(self.problems),
        }

    def _median(self, of_move: Callable[[Move], float]) -> float:
        return statistics.median(map(of_move, self.moves))

    def _us_per_segment(self, cpu_s: Callable[[Move], float]) -> float | None:
        """Processor time of workers inside their clients; every segment is gathered once and scattered once."""
        if not self.moves[-1].sent.num_segments:
            return None
        return self._median(lambda move: cpu_s(move) / move.sent.num_segments) * 1e6

    def _stage_ms(self, stage_s: Callable[[TransferStats], float], *, sending: bool) -> float:
        return self._median(lambda move: sum(map(stage_s, (move.sent,) if sending else move.landed))) * 1e3


def run_case(case: TransferCase, steps: Steps) -> TransferResult:
    """Run one case, which was checked, in processes of its own. Raises `KvxferError` where it cannot be run."""
    return run_cases([case], steps)[0]


def run_with_plot(case: TransferCase, steps: Steps, plot: Path) -> TransferResult:
    """`run_case`, and the timeline of the last transfer drawn into `plot`."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-trace-") as trace_dir:
        result = run_cases([case], steps, trace_dir)[0]
        # The agents have ended: all that they noted is in the files.
        last = result.moves[-1]
        title = f"kvxfer: {case.mode}, {case.num_bytes / 1e6:,.1f} MB to {case.num_ranks} ranks"
        draw_timeline(plot, title, read_spans(Path(trace_dir), last.start_s, last.elapsed_s))
    return result


def run_cases(cases: Sequence[TransferCase], steps: Steps, trace_dir: str = "") -> list[TransferResult]:
    """Run cases of one device, which were checked, one after another; what they have in common is started once. With a
    `trace_dir`, agents note there what they do (`ops.tracing`).

    Raises `KvxferError` where one cannot be run.
    """
    num_gpus = cases[0].num_gpus if cases[0].device == "cuda" else None
    with CaseRunner(max(case.num_ranks for case in cases), num_gpus, steps) as runner:
        return [runner.run(case, trace_dir) for case in cases]


class CaseRunner:
    """Runs cases of up to `num_ranks` ranks with pools on `num_gpus` GPUs, or, None, on the host. Leaving the context
    ends all processes."""

    def __init__(self, num_ranks: int, num_gpus: int | None, steps: Steps | None = None) -> None:
        self._steps = steps or Steps()
        self._steps("starting workers")
        with contextlib.ExitStack() as stack:
            self._cast = stack.enter_context(Cast())
            self._stage = Stage(self._cast, num_ranks, num_gpus)
            self._stack = stack.pop_all()

    def run(self, case: TransferCase, trace_dir: str = "") -> TransferResult:
        """Run a case, which was checked. Raises `KvxferError` where it cannot be run; no other follows then."""
        return _run_on(self._stage, case, self._steps, trace_dir)

    def log_tails(self) -> str:
        """The last lines that each process wrote to standard error."""
        return self._cast.log_tails()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _run_on(stage: Stage, case: TransferCase, steps: Steps, trace_dir: str) -> TransferResult:
    paging = page_tables(
        Placement.SHARDED, case.num_tokens, case.page_tokens, case.num_ranks, case.interleave, case.pages == "shuffled"
    )
    steps(f"{case.mode}: starting agents")
    ensemble = stage.ensemble(replace(case.setup(), trace_dir=trace_dir))
    yardstick: Yardstick | CopyYardstick | None = None
    if case.has_yardstick:
        if case.stays_on_gpus:
            yardstick = CopyYardstick(ensemble, case.num_bytes)
        else:
            yardstick = stage.yardstick(case.transport, case.num_bytes)
    ensemble.hand_over(_pool(case, paging.src_pages, Shard()), _dst_pools(case, paging), fill=0)
    rows = protocol.PatternRows(
        seed=_SEED, num_layers=case.num_layers, num_tokens=case.num_tokens, row_bytes=case.row_bytes
    )
    ensemble.prefill.ask(
        protocol.FillRows(group="kv", rows=rows, pages=paging.src_pages), protocol.Done, _FILL_TIMEOUT_S
    )
    nothing = paging.none_of_it()
    pairing = Pace(deadline_s=case.deadline_s)
    pair = ensemble.move(cut_chunks({"kv": nothing}, frozenset(), 0, 1), _receive(nothing), pace=pairing)
    return _measure(case, ensemble, yardstick, paging, rows, pair, steps)


def _measure(
    case: TransferCase,
    ensemble: Ensemble,
    yardstick: Yardstick | CopyYardstick | None,
    paging: Paging,
    rows: protocol.PatternRows,
    pair: Move,
    steps: Steps,
) -> TransferResult:
    chunks = cut_chunks({"kv": paging}, frozenset(), case.num_tokens, case.chunk_tokens)
    expected = [{"kv": protocol.Expected(pages=groups["kv"], source=rows)} for groups in _receive(paging)]
    moves: list[Move] = []
    alone_per_s: list[float] = []
    contiguous_s: list[float] = []
    problems: list[str] = []
    for repeat in range(case.num_repeats + 1):  # the first one warms up
        steps(f"{case.mode}: repeat {repeat} of {case.num_repeats}")
        ensemble.refill(_FILL)
        if case.busy != "none":
            alone_per_s.append(ensemble.compute_alone(case.busy))
        moves.append(ensemble.move(chunks, _receive(paging), pace=case.pace()))
        if yardstick is not None:
            contiguous_s.append(yardstick.write_once())
        found = ensemble.verify(expected)
        problems += [f"repeat {repeat}, rank {rank}: {each}" for rank, each in enumerate(found) if each]
    if yardstick is not None:
        problems += yardstick.check()
    return TransferResult(
        case,
        pair.elapsed_s,
        tuple(moves[1:]),
        statistics.median(contiguous_s[1:]) if contiguous_s else None,
        yardstick.path if yardstick is not None else "",
        tuple(problems),
        statistics.median(alone_per_s) if alone_per_s else None,
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
