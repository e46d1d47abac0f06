"""Metrics in the text format of Prometheus, made out of what the agent counts anyway when somebody asks for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvxfer.ops.figures import AgentFigures
from kvxfer.ops.server import Page
from kvxfer.ops.totals import CoreFigures
from kvxfer.transfer import EventKind, Reason

FRESH_S = 0.1
"""For so long the same text is served again: a flood of requests must not take the interpreter from the loop."""

_Samples = Mapping[tuple[str, ...], float]
_Family = CounterMetricFamily | GaugeMetricFamily
_REFUSALS = {"prefill": ("stale", "unpaired", "unexpected"), "decode": ("stale", "unexpected", "repeated segment")}
_GOOD_END = {"prefill": EventKind.SENT, "decode": EventKind.LANDED}


class MetricsPage:
    """`/metrics` of one agent, with a registry of its own."""

    def __init__(self, figures: Callable[[], AgentFigures]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(AgentCollector(figures))
        self._page = Page(200, b"")
        self._made_at = -FRESH_S

    def __call__(self) -> Page:
        now = time.monotonic()
        if now >= self._made_at + FRESH_S:
            self._page = Page(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)
            self._made_at = now
        return self._page


class AgentCollector(Collector):
    """Turns `AgentFigures` into metrics. Every one has the label `side`."""

    def __init__(self, figures: Callable[[], AgentFigures]) -> None:
        self._figures = figures
        self._num_done = 0

    def collect(self) -> Iterator[_Family]:
        now = self._figures()
        yield from _transfers(now)
        yield from _core(now.side, now.core)
        yield from self._engine(now)
        yield from _peers(now)

    def _engine(self, now: AgentFigures) -> Iterator[_Family]:
        engine = now.engine
        # The engine's thread may be between two of its counts; a counter must never fall.
        done = engine.num_writes - engine.num_failed - engine.num_unknown
        self._num_done = max(self._num_done, done)
        outcomes = {"done": self._num_done, "failed": engine.num_failed, "unknown": engine.num_unknown}
        side = now.side
        yield _counter("engine_writes", "Writes that have ended, probes included.", side, "outcome", _by_name(outcomes))
        yield _counter(
            "engine_descriptors", "Descriptors of writes that are done.", side, "", _one(engine.num_descriptors)
        )
        yield _counter("engine_bytes", "Bytes of writes that are done.", side, "", _one(engine.num_bytes))
        yield _counter("engine_rotations", "Engine objects that were replaced.", side, "", _one(engine.num_rotations))
        yield _counter("engine_post_seconds", "Time inside the engine's posting calls.", side, "", _one(engine.post_s))


def _transfers(now: AgentFigures) -> Iterator[_Family]:
    core = now.core
    ends: dict[tuple[str, ...], float] = {(_GOOD_END[now.side].value, ""): 0}
    for reason in Reason:
        kind = EventKind.ABORTED if reason is Reason.ABORTED_BY_WORKER else EventKind.FAILED
        ends[kind.value, reason.value] = 0
    for (kind, reason_or_none), num in core.totals.ends.copy().items():
        ends[kind.value, reason_or_none.value if reason_or_none else ""] = num
    side = now.side
    yield _counter("transfers_ended", "Transfers by their end and its reason.", side, "end reason", ends)
    yield _gauge("transfers_open", "Transfers that have not ended on both sides.", side, "", _one(core.num_open))
    yield _counter("moved_bytes", "KV bytes of transfers that ended well.", side, "", _one(core.totals.num_bytes))
    totals = core.totals
    stages = {"plan": totals.plan_s, "pack": totals.pack_s, "send": totals.send_s}
    if side == "decode":
        stages = {"plan": totals.plan_s, "scatter": totals.scatter_s}
    yield _counter("stage_seconds", "Time spent in each stage, over all threads.", side, "stage", _by_name(stages))


def _core(side: str, core: CoreFigures) -> Iterator[_Family]:
    yield _gauge("slots", "Slots by state.", side, "state", _by_name(core.slots))
    refused = _by_name({**dict.fromkeys(_REFUSALS[side], 0), **core.refused})
    yield _counter("messages_refused", "Messages that were dropped, by what was wrong.", side, "kind", refused)
    if side == "prefill":
        yield _counter("legs_chosen", "Legs in mode auto by the mode chosen.", side, "mode", _by_name(core.chosen))
        yield _counter("gather_fallbacks", "Gathers that failed and went raw.", side, "", _one(core.num_fallbacks))


def _peers(now: AgentFigures) -> Iterator[_Family]:
    side = now.side
    yield _gauge("peers", "Paired agents.", side, "", _one(len(now.paths)))
    paths = _by_name(Counter(now.paths))
    yield _gauge("peer_paths", "Paired agents by the path that the engine takes to them.", side, "path", paths)
    yield _gauge("worker_attached", "Whether a worker has handed its pool over.", side, "", _one(now.has_worker))
    told = "How long a move by the agent's own stream on a GPU takes when none is before it; 0 without one."
    yield _gauge("gpu_turn_seconds", told, side, "", _one(now.gpu_turn_s or 0.0))
    told = "Slots that would carry the rate of the fastest path at such turns; 0 where there are enough."
    yield _gauge("gpu_slots_wanted", told, side, "", _one(now.num_slots_wanted))
    yield _gauge("agent_info", "This agent; always 1.", side, "transport", {(now.transport,): 1})
    if now.door is not None:
        door = now.door
        results = {
            "admitted": door.num_admitted,
            "refused": door.num_refused,
            "failed": door.num_failed,
            "stranger": door.num_strangers,
        }
        yield _counter(
            "connections", "Connections of other agents by what came of them.", side, "result", _by_name(results)
        )


def _one(value: float) -> _Samples:
    return {(): value}


def _by_name(values: Mapping[str, float]) -> _Samples:
    return {(name,): value for name, value in values.items()}


def _counter(name: str, text: str, side: str, labels: str, samples: _Samples) -> _Family:
    return _fill(CounterMetricFamily(f"kvxfer_{name}", text, labels=_labels(labels)), side, samples)


def _gauge(name: str, text: str, side: str, labels: str, samples: _Samples) -> _Family:
    return _fill(GaugeMetricFamily(f"kvxfer_{name}", text, labels=_labels(labels)), side, samples)


def _labels(more: str) -> list[str]:
    return ["side", *more.split()]


def _fill(family: _Family, side: str, samples: _Samples) -> _Family:
    for labels, value in samples.items():
        family.add_metric([side, *labels], value)
    return family
