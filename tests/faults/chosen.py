"""What runs in CI."""

from __future__ import annotations

from tests.faults.matrix import ALL
from tests.faults.runner import Scenario

SCENARIOS: list[Scenario] = []
CHOSEN: list[Scenario] = [*ALL[:4], *SCENARIOS]
