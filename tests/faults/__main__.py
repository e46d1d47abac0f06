"""`python -m tests.faults`: the subset that runs in CI; with `--all` the whole matrix. `--only TEXT` picks by name."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

import msgspec

from tests.faults.chosen import CHOSEN
from tests.faults.cuts import CUTS
from tests.faults.held_loops import HELD_LOOPS
from tests.faults.matrix import ALL
from tests.faults.runner import Scenario, run_all
from tests.faults.scenarios import SCENARIOS

NUM_PARALLEL = 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every cell of the matrix and every scenario")
    parser.add_argument("--only", default="", help="those whose name holds this text")
    parser.add_argument("--jobs", type=int, default=NUM_PARALLEL, help="scenarios beside each other")
    parser.add_argument("--json", action="store_true", help="one line of JSON each")
    arguments = parser.parse_args()
    pool: list[Scenario] = [*ALL, *SCENARIOS, *HELD_LOOPS, *CUTS] if arguments.all or arguments.only else CHOSEN
    scenarios = [each for each in pool if arguments.only in each.name]
    began_s = time.monotonic()
    num_bad = 0
    for result in run_all(scenarios, arguments.jobs):
        num_bad += bool(result.problem)
        if arguments.json:
            sys.stdout.write(msgspec.json.encode(dataclasses.asdict(result)).decode() + "\n")
        else:
            verdict = "WRONG" if result.problem else "none" if result.skipped else "ok"
            text = result.skipped or result.figures
            sys.stdout.write(f"{verdict:6}{result.elapsed_s:6.1f} s  {result.name:62}{text}\n")
            sys.stdout.write(result.problem)
        sys.stdout.flush()
    if not arguments.json:
        sys.stdout.write(f"{len(scenarios)} scenarios in {time.monotonic() - began_s:.0f} s, {num_bad} wrong\n")
    sys.exit(1 if num_bad else 0)


if __name__ == "__main__":
    main()
