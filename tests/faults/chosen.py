"""What runs in CI: every scenario, and so much of the matrix that each victim meets each fault and all points occur."""

from __future__ import annotations

from tests.faults.cuts import CUTS
from tests.faults.held_loops import HELD_LOOPS
from tests.faults.matrix import ALL, Case
from tests.faults.runner import Scenario
from tests.faults.scenarios import SCENARIOS, Script
from tests.faults.soak import soak

# The two agents at every point on one transport; the workers, whose end reaches the cores as one event at any point,
# where most is under way; over NIXL the kills that leave an engine in the middle of a write.
_CELLS = [
    ("loopback", "pa", "kill", "granted"),
    ("loopback", "da0", "kill", "before grant"),
    ("loopback", "pa", "stop", "first gather"),
    ("loopback", "da0", "stop", "write in flight"),
    ("loopback", "pa", "kill", "segment noticed"),
    ("loopback", "da0", "stop", "last segment written"),
    ("loopback", "pa", "kill", "finished"),
    ("loopback", "da0", "stop", "finished"),
    ("loopback", "pa", "stop", "landed"),
    ("loopback", "pw", "kill", "write in flight"),
    ("loopback", "pw", "stop", "segment noticed"),
    ("loopback", "dw0", "kill", "segment noticed"),
    ("loopback", "dw0", "stop", "write in flight"),
    ("nixl", "pa", "kill", "write in flight"),
    ("nixl", "da0", "kill", "write in flight"),
    ("nixl", "pa", "stop", "write in flight"),
    ("nixl", "da0", "stop", "segment noticed"),
]
CHOSEN_CASES: list[Case] = [case for case in ALL if (case.transport, case.victim, case.fault, case.point) in _CELLS]


def _short_soak() -> str:
    parts, _ = soak(300, "loopback", num_restarts=1)  # too short to judge what a segment costs
    return f"{sum(part.elapsed_s for part in parts):.0f} s"


CHOSEN: list[Scenario] = [*CHOSEN_CASES, *SCENARIOS, *HELD_LOOPS, *CUTS, Script("a soak of 300 transfers", _short_soak)]
