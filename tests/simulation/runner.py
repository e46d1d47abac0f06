"""Schedules by seed or by record, one or many, in one process or several."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvxfer.errors import KvxferError
from tests.simulation.choices import Choices
from tests.simulation.planted import Bug
from tests.simulation.topology import cached_plans
from tests.simulation.violation import InvariantBroken
from tests.simulation.world import World

_CRASHES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, KvxferError)
_BATCH = 25


@dataclass(frozen=True, slots=True)
class Broken:
    """A schedule that broke an invariant, or crashed a core."""

    seed: int | None
    kind: str
    detail: str
    record: tuple[int, ...]


def run_schedule(choices: Choices, bug: Bug | None = None, seed: int | None = None) -> Broken | None:
    """Run one schedule to its end."""
    try:
        World(choices, bug).run()
    except InvariantBroken as broken:
        return Broken(seed, broken.kind, str(broken), tuple(choices.record))
    except _CRASHES as error:
        return Broken(seed, f"crash: {type(error).__name__}", repr(error), tuple(choices.record))
    return None


def run_seeds(seeds: Iterable[int], bug: Bug | None = None) -> list[Broken]:
    """Run the schedules of `seeds` in this process."""
    with cached_plans():
        outcomes = [run_schedule(Choices(seed), bug, seed) for seed in seeds]
    return [outcome for outcome in outcomes if outcome is not None]


def replay(record: Sequence[int], bug: Bug | None = None) -> Broken | None:
    """Run a schedule again from its record."""
    with cached_plans():
        return run_schedule(Choices(None, record), bug)


@dataclass(frozen=True, slots=True)
class Summary:
    """Many schedules."""

    num_schedules: int
    elapsed_s: float
    broken: tuple[Broken, ...]

    @property
    def schedules_per_s(self) -> float:
        return self.num_schedules / self.elapsed_s


def run_many(
    first_seed: int, num_schedules: int, num_processes: int, bug: Bug | None = None, *, stop_at: int = 10
) -> Summary:
    """Run the schedules of `num_schedules` seeds from `first_seed` on, until `stop_at` of them are broken."""
    began_s = time.perf_counter()
    broken: list[Broken] = []
    num_done = 0
    for num_seeds, found in _batches(first_seed, num_schedules, num_processes, bug):
        num_done += num_seeds
        broken += found
        if len(broken) >= stop_at:
            break
    return Summary(num_done, time.perf_counter() - began_s, tuple(broken))


def _batches(
    first_seed: int, num_schedules: int, num_processes: int, bug: Bug | None
) -> Iterator[tuple[int, list[Broken]]]:
    end_seed = first_seed + num_schedules
    jobs = [(range(seed, min(seed + _BATCH, end_seed)), bug) for seed in range(first_seed, end_seed, _BATCH)]
    if num_processes == 1:
        yield from map(_run_batch, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap(_run_batch, jobs)


def _run_batch(job: tuple[range, Bug | None]) -> tuple[int, list[Broken]]:
    seeds, bug = job
    return len(seeds), run_seeds(seeds, bug)
