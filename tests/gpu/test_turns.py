"""Agents that wait for turns on a GPU with a worker that computes say when their slots are too few for that.

Its part without a GPU: tests/ops/test_turns.py and tests/test_agents_own_streams.py.
"""

from __future__ import annotations

import re
import sys

import pytest

from kvxfer.cli.bench_transfer import CaseRunner
from kvxfer.cli.transfer_case import TransferCase

pytestmark = pytest.mark.gpu(limit_s=60.0)


def test_agents_say_that_slots_are_too_few() -> None:
    """512 KiB of slots carry 0.2 GB/s where a turn comes every 2.4 ms; any path does more."""
    case = TransferCase(
        transport="loopback",
        mode="packed",
        num_tokens=4096,
        num_layers=8,
        row_bytes=1152,
        page_tokens=64,
        pages="shuffled",
        num_ranks=1,
        interleave=1,
        chunk_tokens=1024,
        num_repeats=2,
        num_slots=2,
        slot_bytes=256 << 10,
        device="cuda",
        placement="agent",
        busy="long",
        deadline_s=20.0,
    )
    case.check()
    with CaseRunner(1, 1) as runner:
        result = runner.run(case)
        logs = {path.name: path.read_text(encoding="utf-8") for path in runner._cast.directory.glob("*.log")}
    assert result.problems == ()
    said = {name: re.findall(r"slots\.num_slots: got 2, expected \d+: [^\"]*", text) for name, text in logs.items()}
    sys.stdout.write("\n".join(f"{name}: {lines}" for name, lines in said.items()) + "\n")
    assert sorted(len(lines) for lines in said.values())[-2:] == [1, 1], f"expected a line of each agent, once: {said}"
    assert sum(map(len, said.values())) == 2
