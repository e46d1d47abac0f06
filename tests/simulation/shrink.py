"""Make a broken schedule small: fewer decisions, and smaller ones, as long as it breaks in the same way."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.choices import Choices
from tests.simulation.planted import Bug
from tests.simulation.runner import Broken, run_schedule
from tests.simulation.topology import cached_plans

Record = tuple[int, ...]


def shrink(broken: Broken, bug: Bug | None = None, max_runs: int = 3000) -> Broken:
    """The smallest schedule found in `max_runs` that breaks like `broken`."""
    best = broken
    num_runs = 0
    with cached_plans():
        has_improved = True
        while has_improved and num_runs < max_runs:
            has_improved = False
            candidates = _smaller(best.record)
            for candidate in candidates:
                num_runs += 1
                if num_runs > max_runs:
                    break
                found = run_schedule(Choices(None, candidate), bug)
                if found is None or found.kind != broken.kind or _weight(found.record) >= _weight(best.record):
                    continue
                best = Broken(broken.seed, found.kind, found.detail, _trimmed(found.record))
                has_improved = True
                break
    return best


def _weight(record: Record) -> tuple[int, int]:
    record = _trimmed(record)
    return sum(value != 0 for value in record), sum(record) + len(record)


def _trimmed(record: Record) -> Record:
    """Without the zeros at the end, which a record that has run out goes on with anyway."""
    end = len(record)
    while end and record[end - 1] == 0:
        end -= 1
    return record[:end]


def _smaller(record: Record) -> Iterator[Record]:
    """Candidates, the boldest first: blocks left out, blocks set to zero, single numbers made smaller."""
    record = _trimmed(record)
    size = len(record) // 2
    while size:
        for first in range(0, len(record), size):
            if any(record[first : first + size]):
                yield record[:first] + (0,) * len(record[first : first + size]) + record[first + size :]
            yield record[:first] + record[first + size :]
        size //= 2
    for position, value in enumerate(record):
        for smaller in dict.fromkeys((value // 2, value - 1)):
            if 0 < smaller < value:
                yield (*record[:position], smaller, *record[position + 1 :])
