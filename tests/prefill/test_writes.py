"""Writes between the core and the engine: when the peer may be told of one that is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.control.messages import Segment
from kvxfer.operations import CancelFlag
from kvxfer.prefill.actions import Write
from kvxfer.prefill.writes import Writes
from kvxfer.transports.base import Completion, Outcome

NOTICE = Segment(transfer="0" * 32, generation=1, chunk=0, segment=0, slot=2, num_bytes=32)


@pytest.mark.parametrize("may_have_spoilt", [False, True])
def test_a_peer_hears_of_no_slot_that_its_filler_may_have_overwritten(may_have_spoilt: bool) -> None:
    told: list[tuple[str, Segment]] = []
    ended: list[tuple[int, Outcome]] = []
    transport = SimpleNamespace(submit_write=lambda *_: 7, poll=lambda: [Completion(7, Outcome.DONE)])
    sidecar: Any = SimpleNamespace(
        transport=transport,
        slots=SimpleNamespace(address=lambda slot: 4096 * slot),
        rows=SimpleNamespace(may_have_spoilt=False),
        trace=SimpleNamespace(begin=lambda *_: None, end=lambda *_: None),
    )

    class Links:
        def __contains__(self, peer: str) -> bool:
            return peer == "peer"

        def hello(self, _peer: str) -> SimpleNamespace:
            return SimpleNamespace(region_id=1, region_bytes=4096, slot_bytes=64)

        def send(self, peer: str, notice: Segment) -> None:
            told.append((peer, notice))

    core: Any = SimpleNamespace(write_ended=lambda operation, outcome, *_: ended.append((operation, outcome)))
    links: Any = Links()
    raw_pool: Any = None
    writes = Writes(sidecar, links, core, raw_pool)
    writes.post(Write(3, "peer", NOTICE, CancelFlag(), src_slot=1), 0.0)
    sidecar.rows.may_have_spoilt = may_have_spoilt  # while it is under way
    writes.poll(0.0)
    assert told == ([] if may_have_spoilt else [("peer", NOTICE)])
    assert ended == [(3, Outcome.FAILED if may_have_spoilt else Outcome.DONE)]
