"""No schedule breaks an invariant; those with a planted fault soon do."""

import pytest

from tests.simulation.planted import Bug
from tests.simulation.runner import replay, run_many, run_seeds
from tests.simulation.shrink import shrink

NUM_PROCESSES = 2
NUM_SCHEDULES_TO_FIND_A_BUG = 2000
_KINDS = {
    Bug.GENERATION_NOT_CHECKED: {"stale message obeyed"},
    Bug.FINISHED_TOO_EARLY: {"finished too early"},
    Bug.REPACKED_ON_UNKNOWN: {"slot reused"},
    Bug.NO_TOMBSTONE: {"emitted after quiesced", "fair transfer failed"},  # the dead leg takes slots, or fails others
    Bug.QUIESCED_COUNTS_POSTED: {"quiesced too early"},
    Bug.TERMINAL_BEFORE_DRAINED: {"event over scatters"},
    Bug.LOST_CREDITS_FORGOTTEN: {"fair transfer failed"},
    Bug.REGION_NOT_CHECKED: {"written to an old region"},
    Bug.CORRUPTION_IGNORED: {"corrupt segment", "landed too early"},
    Bug.TIMELINE_IGNORED: {"wrong value", "landed too early"},
    Bug.PULLED_UNREADY: {"landed too early"},
}


def test_a_few_schedules_break_nothing() -> None:
    assert run_seeds(range(1_000_000, 1_000_200)) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_thousand_schedules_break_nothing() -> None:
    summary = run_many(0, 20_000, NUM_PROCESSES, stop_at=1)
    assert summary.broken == ()
    assert summary.num_schedules == 20_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", Bug)
def test_planted_bug_is_found(bug: Bug) -> None:
    summary = run_many(0, NUM_SCHEDULES_TO_FIND_A_BUG, NUM_PROCESSES, bug, stop_at=1)
    assert summary.broken
    assert {broken.kind for broken in summary.broken} <= _KINDS[bug]


def test_replay_and_shrinking_are_exact() -> None:
    bug = Bug.TERMINAL_BEFORE_DRAINED
    found = run_seeds(range(40), bug)[0]
    assert found.seed is not None
    assert run_seeds([found.seed], bug) == [found]
    again = replay(found.record, bug)
    assert again is not None
    assert (again.kind, again.detail, again.record) == (found.kind, found.detail, found.record)

    small = shrink(found, bug, max_runs=200)
    assert len(small.record) < len(found.record)
    shown = replay(small.record, bug)
    assert shown is not None
    assert (shown.kind, shown.detail) == (small.kind, small.detail)
    assert replay(small.record) is None  # it is the planted fault that breaks, not the schedule
