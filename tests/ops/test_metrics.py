"""The metrics: which there are, what they are called, and that a scrape and the loop do not disturb each other."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvxfer.ops.config import OpsConfig
from kvxfer.ops.figures import AgentFigures
from kvxfer.ops.metrics import AgentCollector
from kvxfer.ops.totals import CoreFigures, Totals
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.base import Counters, Outcome
from tests.agent_world import AgentWorld
from tests.ops.http_get import Scrape
from tests.test_agents import Split, build

_DOC = (Path(__file__).parent.parent.parent / "docs" / "operations.md").read_text(encoding="utf-8")
_LOG = logging.getLogger("tests.ops")
_OPS = OpsConfig(listen_host="127.0.0.1")


def _documented() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of each metric in the table."""
    rows = re.findall(r"^\| `(kvxfer_\w+)` \| (\w+) \|([^|]*)\|", _DOC, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_table_in_the_docs_is_what_is_served(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split(), ops=_OPS)
        world.move(10)
        found: dict[str, tuple[str, set[str]]] = {}
        for thread in world.threads.values():
            for family in Scrape(thread.agent.ops.endpoint).families:
                for sample in family.samples:
                    _, labels = found.setdefault(sample.name, (family.type, set()))
                    labels |= sample.labels.keys() - {"side"}
                    assert "side" in sample.labels
    assert found == _documented()


def test_ends_have_the_words_of_reason() -> None:
    totals = Totals(_LOG)
    totals.ended("a", EventKind.LANDED, None, "", 100)
    totals.ended("b", EventKind.FAILED, Reason.CORRUPT, "why", 50)
    totals.ended("c", EventKind.ABORTED, Reason.ABORTED_BY_WORKER, "", 50)
    samples = _collect(totals, Counters())
    ends = {
        (labels["end"], labels["reason"]): value
        for name, labels, value in samples
        if name == "kvxfer_transfers_ended_total"
    }
    assert {reason for _, reason in ends} == {"", *(reason.value for reason in Reason)}
    assert {end: num for end, num in ends.items() if num} == {
        ("landed", ""): 1.0,
        ("failed", "corrupt"): 1.0,
        ("aborted", "aborted_by_worker"): 1.0,
    }
    assert [value for name, _, value in samples if name == "kvxfer_moved_bytes_total"] == [100.0]


def test_a_log_line_has_the_reason_as_a_field(caplog: pytest.LogCaptureFixture) -> None:
    totals = Totals(_LOG)
    with caplog.at_level("INFO", logger="tests.ops"):
        totals.ended("a", EventKind.SENT, None, "", 100)
        totals.ended("b", EventKind.FAILED, Reason.DEADLINE, "", 0)
    (record,) = caplog.records
    assert vars(record)["reason"] == "deadline"
    assert record.getMessage() == "transfer b failed: deadline"


def test_counters_never_fall() -> None:
    """The engine's thread has counted a write, and not yet that it failed."""
    engine = Counters()
    engine.count(Outcome.DONE, 1, 8)
    engine.num_writes += 1
    collector = AgentCollector(lambda: _figures(Totals(_LOG), engine))
    assert _done(collector) == 2.0
    engine.num_failed += 1
    assert _done(collector) == 2.0
    engine.count(Outcome.DONE, 1, 8)
    engine.count(Outcome.DONE, 1, 8)
    assert _done(collector) == 3.0


def test_scrapes_while_transfers_run(tmp_path: Path) -> None:
    """Dictionaries of the loop change while another thread reads them."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(), ops=_OPS)
        agents = [thread.agent for thread in world.threads.values()]
        problems: list[BaseException] = []
        stop = threading.Event()

        def read() -> None:
            collectors = [AgentCollector(agent.figures) for agent in agents]
            while not stop.is_set():
                try:
                    for collector in collectors:
                        list(collector.collect())
                except RuntimeError as error:
                    problems.append(error)
                    return

        thread = threading.Thread(target=read)
        thread.start()
        for salt in range(15):
            world.move(16, salt=salt)
        stop.set()
        thread.join()
        assert not problems
        for agent in agents:
            assert Scrape(agent.ops.endpoint)("kvxfer_transfers_open", agent.figures().side) == 0


def test_an_agent_without_metrics_does_without_their_library() -> None:
    program = "import sys, kvxfer.prefill.agent, kvxfer.decode.agent; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def _figures(totals: Totals, engine: Counters) -> AgentFigures:
    core = CoreFigures(totals, num_open=0, slots={"free": 1}, refused={})
    return AgentFigures("decode", "loopback", core, engine, paths=["memory"], has_worker=True)


def _collect(totals: Totals, engine: Counters) -> list[tuple[str, dict[str, str], float]]:
    registry = CollectorRegistry()
    registry.register(AgentCollector(lambda: _figures(totals, engine)))
    text = generate_latest(registry).decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def _done(collector: AgentCollector) -> float:
    return next(
        sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name == "kvxfer_engine_writes_total" and sample.labels["outcome"] == "done"
    )
