"""Run schedules: `python -m tests.simulation --schedules N --seed S [--replay SEED] [--plant BUG]`."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.planted import Bug
from tests.simulation.runner import Broken, run_many, run_seeds
from tests.simulation.shrink import shrink


def main() -> int:
    """The exit status: 1 where an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; the others follow it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this one schedule again, and shrink it")
    parser.add_argument("--plant", choices=[bug.value for bug in Bug], help="plant this fault first")
    arguments = parser.parse_args()
    bug = Bug(arguments.plant) if arguments.plant else None
    if arguments.replay is not None:
        found = run_seeds([arguments.replay], bug)
        _show("holds" if not found else "breaks", found, bug)
        return bool(found)
    summary = run_many(arguments.seed, arguments.schedules, arguments.processes, bug)
    speed = f"{summary.schedules_per_s:.0f} schedules/s on {arguments.processes} processes"
    _show(f"{summary.num_schedules} schedules, {speed}, {len(summary.broken)} broken", summary.broken[:1], bug)
    return bool(summary.broken)


def _show(headline: str, broken: list[Broken] | tuple[Broken, ...], bug: Bug | None) -> None:
    sys.stdout.write(headline + "\n")
    for each in broken:
        small = shrink(each, bug)
        sys.stdout.write(f"seed {each.seed}: {each.detail}\nshrunk to {len(small.record)} decisions: {small.detail}\n")
        sys.stdout.write(f"{small.record}\n")


if __name__ == "__main__":
    sys.exit(main())
