"""The timeline of one transfer as an SVG: what went on in each slot of each agent."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from kvxfer.cli.output import check_plot_file
from kvxfer.errors import ConfigError
from kvxfer.ops.tracing import OperationKind, TracedOperation, read_trace

SpanKind = OperationKind | Literal["wait"]

_COLOURS: dict[SpanKind, str] = {"gather": "#3b7dd8", "wait": "#d9d9d9", "write": "#e08a1e", "scatter": "#3a9d5d"}
_NAMES: dict[SpanKind, str] = {"gather": "gather", "wait": "packed, waits", "write": "write", "scatter": "scatter"}
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX = 110, 20, 56, 40
_LANE_PX, _BAR_PX, _CHART_PX = 16, 12, 1000
_MAX_TICKS = 12


@dataclass(frozen=True, slots=True)
class Span:
    """One bar: seconds from the start of the transfer. A segment that is packed `wait`s for a credit, then for the
    engine to be given it."""

    lane: str
    kind: SpanKind
    segment: int
    begin_s: float
    end_s: float


def read_spans(directory: Path, start_s: float, elapsed_s: float) -> list[Span]:
    """What the agents of an `Ensemble` noted of a transfer that began at `start_s`, in the order of the lanes."""
    spans: list[Span] = []
    sent = _within(read_trace((directory / "prefill-agent").read_bytes()), start_s, elapsed_s)
    spans += _spans_of(sent, "send", start_s)
    spans += _waits(spans)
    for rank in itertools.count():
        path = directory / f"decode-agent-{rank}"
        if not path.exists():
            break
        landed = _within(read_trace(path.read_bytes()), start_s, elapsed_s)
        spans += _spans_of(landed, f"rank {rank}", start_s)
    return sorted(spans, key=lambda span: _lane_order(span.lane))


def _within(operations: Iterable[TracedOperation], start_s: float, elapsed_s: float) -> list[TracedOperation]:
    # Some milliseconds more at the end: the loop notes an end after it has told of it.
    return [each for each in operations if start_s <= each.given_s and each.ended_s <= start_s + elapsed_s + 0.05]


def _spans_of(operations: Iterable[TracedOperation], whose: str, start_s: float) -> Iterator[Span]:
    for each in operations:
        lane = f"{whose}, no slot" if each.slot is None else f"{whose}, slot {each.slot}"
        end_s = each.ended_s - start_s
        yield Span(lane, each.kind, each.segment, max(each.given_s - start_s, end_s - each.busy_s), end_s)


def _waits(sent: list[Span]) -> list[Span]:
    """Between the end of a gather and the next write out of its slot."""
    waits = []
    for lane in {span.lane for span in sent}:
        packed: Span | None = None
        for span in sorted((each for each in sent if each.lane == lane), key=lambda each: each.end_s):
            if span.kind == "gather":
                packed = span
            elif packed is not None and span.begin_s >= packed.end_s:
                waits.append(Span(lane, "wait", packed.segment, packed.end_s, span.begin_s))
                packed = None
    return waits


def _lane_order(lane: str) -> tuple[int, int, int]:
    whose, _, slot = lane.partition(", ")
    rank = -1 if whose == "send" else int(whose.removeprefix("rank "))
    return rank >= 0, rank, -1 if slot == "no slot" else int(slot.removeprefix("slot "))


def check_plot(path: Path, compare: str) -> None:
    """Raise `ConfigError` where no SVG of one transfer can be drawn into `path`: before the run, not after it."""
    if compare:
        raise ConfigError(f"--plot: got {path} beside --compare {compare}, expected one of the two options")
    if path.suffix != ".svg":
        raise ConfigError(f"--plot: got {path}, expected a file name that ends in .svg")
    check_plot_file(path)


def draw_timeline(path: Path, title: str, spans: list[Span]) -> None:
    """Draw `spans`, a lane for each slot, into the file `path`. Raises `ConfigError` where it cannot be written."""
    try:
        path.write_text("\n".join(_svg(title, spans)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}") from error


def _svg(title: str, spans: list[Span]) -> Iterator[str]:
    lanes = list(dict.fromkeys(span.lane for span in spans))
    end_s = max((span.end_s for span in spans), default=1e-3)
    height_px = _TOP_PX + _LANE_PX * len(lanes) + _BOTTOM_PX
    width_px = _LEFT_PX + _CHART_PX + _RIGHT_PX
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px} {height_px}" width="{width_px}" '
        f'height="{height_px}" font-family="sans-serif" font-size="11">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect class="ground" width="{width_px}" height="{height_px}" fill="white"/>'
    yield f'<text x="{_LEFT_PX}" y="18" font-size="14">{escape(title)}</text>'
    yield from _legend()
    yield from _axis(end_s, _TOP_PX + _LANE_PX * len(lanes))
    for row, lane in enumerate(lanes):
        middle_px = _TOP_PX + _LANE_PX * row + _LANE_PX // 2
        yield f'<text x="{_LEFT_PX - 6}" y="{middle_px + 4}" text-anchor="end">{escape(lane)}</text>'
    rows = {lane: row for row, lane in enumerate(lanes)}
    for span in spans:
        yield _bar(span, _TOP_PX + _LANE_PX * rows[span.lane], _CHART_PX / end_s)
    yield "</svg>"


def _legend() -> Iterator[str]:
    for place, (kind, colour) in enumerate(_COLOURS.items()):
        left_px = _LEFT_PX + 130 * place
        yield f'<rect class="legend" x="{left_px}" y="28" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{left_px + 17}" y="38">{_NAMES[kind]}</text>'


def _axis(end_s: float, bottom_px: int) -> Iterator[str]:
    step_ms = _step_ms(end_s * 1e3)
    for number in range(int(end_s * 1e3 / step_ms) + 1):
        left_px = _LEFT_PX + number * step_ms * 1e-3 / end_s * _CHART_PX
        yield f'<path d="M{left_px:.2f} {_TOP_PX}V{bottom_px + 4}" stroke="#cccccc"/>'
        yield f'<text x="{left_px:.2f}" y="{bottom_px + 17}" text-anchor="middle">{number * step_ms:g}</text>'
    yield f'<text x="{_LEFT_PX + _CHART_PX // 2}" y="{bottom_px + 33}" text-anchor="middle">ms</text>'


def _step_ms(whole_ms: float) -> float:
    """1, 2 or 5 times a power of ten, for at most `_MAX_TICKS` steps."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if whole_ms / (factor * power) <= _MAX_TICKS:
                return factor * power
        power *= 10


def _bar(span: Span, top_px: int, px_per_s: float) -> str:
    left_px = _LEFT_PX + span.begin_s * px_per_s
    width_px = max((span.end_s - span.begin_s) * px_per_s, 0.3)
    times = f"{span.begin_s * 1e3:.3f} to {span.end_s * 1e3:.3f} ms"
    return (
        f'<rect class="{span.kind}" x="{left_px:.2f}" y="{top_px + (_LANE_PX - _BAR_PX) // 2}" width="{width_px:.2f}" '
        f'height="{_BAR_PX}" fill="{_COLOURS[span.kind]}">'
        f"<title>{span.lane}: {_NAMES[span.kind]}, segment {span.segment}, {times}</title></rect>"
    )
