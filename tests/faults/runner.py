"""Runs scenarios beside each other, each in a forked process of its own."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from tests.faults.forked import Forked, Wire, hear


class Scenario(Protocol):
    @property
    def name(self) -> str: ...

    def run(self) -> str:
        """Returns what was measured. Raises `FaultError` for what is wrong."""
        ...

    def why_not(self) -> str:
        """Why it cannot be run on this machine; empty if it can."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """How a scenario went. `problem` is empty when all is right, `skipped` when it was run."""

    name: str
    elapsed_s: float
    figures: str
    problem: str
    skipped: str = ""


def run_all(scenarios: Sequence[Scenario], num_parallel: int, limit_s: float = 90.0) -> Iterator[Result]:
    """Results as they come. One that takes longer than `limit_s` is ended with all its processes."""
    waiting = list(scenarios)
    running: dict[Forked, tuple[Scenario, float]] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        while waiting or running:
            while waiting and len(running) < num_parallel:
                scenario = waiting.pop(0)
                log_path = Path(directory) / f"{len(waiting)}.log"
                running[Forked(scenario.name, partial(_run, scenario), log_path)] = (scenario, time.monotonic())
            hear(running, 1.0)
            for process, (scenario, began_at) in list(running.items()):
                result = process.find(lambda _: True)
                elapsed_s = time.monotonic() - began_at
                is_gone = not process._is_heard
                if result is None and not is_gone and elapsed_s < limit_s:
                    continue
                if result is None:
                    result = {"figures": "", "problem": f"took longer than {limit_s} s or died{process.log_tail()}"}
                del running[process]
                process.end()
                yield Result(scenario.name, elapsed_s, **result)


def _run(scenario: Scenario, wire: Wire) -> None:
    # Where a test before this one had an engine in the same process, it was confined to the loopback interface.
    os.environ.pop("UCX_NET_DEVICES", None)
    skipped = scenario.why_not()
    try:
        wire.send({"figures": "" if skipped else scenario.run(), "problem": "", "skipped": skipped})
    except AssertionError:
        wire.send({"figures": "", "problem": traceback.format_exc()[-20_000:]})
