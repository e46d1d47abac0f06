"""The chosen part of the fault matrix, and every scenario. They run beside each other, in one go before the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.faults.agent_child import POINTS
from tests.faults.chosen import CHOSEN, CHOSEN_CASES
from tests.faults.matrix import ALL, VICTIMS
from tests.faults.runner import Result

_ROOT = Path(__file__).parent.parent.parent
_LIMIT_S = 300.0  # on two cores with other work; alone it takes a quarter of that


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    command = [sys.executable, "-m", "tests.faults", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=False, text=True
    )
    found = [msgspec.json.decode(line, type=Result) for line in done.stdout.splitlines()]
    return {result.name: result for result in found}


def _parameter(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.nixl if name.startswith("nixl") else ())


@pytest.mark.timeout(_LIMIT_S + 30)
@pytest.mark.parametrize("name", [_parameter(scenario.name) for scenario in CHOSEN])
def test_scenario(results: dict[str, Result], name: str) -> None:
    assert name in results, "the run ended before it"
    if results[name].skipped:
        pytest.skip(f"{name}: {results[name].skipped}")
    assert not results[name].problem, results[name].problem


def test_matrix_is_whole_and_the_choice_covers_it() -> None:
    assert len({case.name for case in ALL}) == 2 * len(VICTIMS) * 2 * len(POINTS)
    assert {case.point for case in CHOSEN_CASES} == set(POINTS)
    faults = {(case.victim, case.fault) for case in CHOSEN_CASES}
    assert faults == {(victim, fault) for victim in VICTIMS for fault in ("kill", "stop")}
