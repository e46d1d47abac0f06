"""An agent is killed, or stopped and continued, in the middle of a pull: nothing lands, nobody else is harmed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S
from tests.faults.stage import (
    DEADLINE_S,
    NUM_TOKENS,
    PAGES,
    PEER_TIMEOUT_S,
    POISON,
    Stage,
    begin,
    only_event,
    wait_until,
    words_of,
)

SRC, DST = PAGES[:NUM_TOKENS], PAGES[::-1][:NUM_TOKENS]
SLACK_S = 1.5


def test_a_source_killed_while_rows_are_pulled_lands_nothing(tmp_path: Path) -> None:
    """Its pool stays mapped for the copy under way; nobody is left who could say that the rows were still good."""
    with Stage(tmp_path, "loopback") as stage:
        victim, src, prefill_client = stage.prefill("p0", "p2p")
        _, dst, decode_client = stage.decode("d0")
        src.fill(SRC, 1)
        began_s = time.monotonic()
        ticket = begin(prefill_client, decode_client, SRC, DST)
        wait_until(lambda: dst.num_begun(DST) > 0, "the first rows are pulled")
        victim.child.kill()
        event = only_event(decode_client, ticket)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.PEER_LOST)
        assert time.monotonic() - began_s < PEER_TIMEOUT_S + SLACK_S
        assert prefill_client.wait(ticket, WAIT_S).reason is Reason.AGENT_LOST
        after_end = dst.words.copy()
        src.words[:] = 0xDDDDDDDD
        time.sleep(0.3)
        assert np.array_equal(dst.words, after_end)
        _, other_src, other_client = stage.prefill("p1", "p2p")
        other_src.fill(SRC, 2)
        ticket = begin(other_client, decode_client, SRC, DST)
        assert only_event(decode_client, ticket).event is EventKind.LANDED
        assert (dst.words[DST] == words_of(2)[:, None]).all()


@pytest.mark.parametrize("stopped", ["source", "target"])
def test_a_pull_with_a_stopped_side_is_void(tmp_path: Path, stopped: str) -> None:
    """The live side ends at its deadline; the source's pages hold other rows when the other side goes on."""
    with Stage(tmp_path, "loopback") as stage:
        source, src, prefill_client = stage.prefill("p0", "p2p")
        target, dst, decode_client = stage.decode("d0")
        victim = source if stopped == "source" else target
        src.fill(SRC, 1)
        for _ in range(10):
            dst.words[:] = POISON
            began_s = time.monotonic()
            ticket = begin(prefill_client, decode_client, SRC, DST, DEADLINE_S)
            wait_until(lambda: dst.num_begun(DST) > 0, "the first rows are pulled")
            victim.stop()
            if decode_client.next_event(0.1) is None:
                break
            victim.go_on()  # too late: all were pulled and it was said
            only_event(prefill_client, ticket)
        else:
            raise AssertionError("the pull could not be stopped in its middle")
        live, other = (decode_client, prefill_client) if stopped == "source" else (prefill_client, decode_client)
        event = only_event(live, ticket)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.DEADLINE)
        assert time.monotonic() - began_s < DEADLINE_S + SLACK_S
        src.fill(SRC, 2)
        victim.go_on()
        # A source that was stopped finds `Pulled` before the abort: for it all rows were pulled under its lease.
        may_be_sent = {EventKind.SENT} if stopped == "source" else set()
        assert only_event(other, ticket).event in {EventKind.FAILED} | may_be_sent
        after_end = dst.words.copy()
        src.fill(SRC, 3)
        time.sleep(0.5)
        assert np.array_equal(dst.words, after_end)
        ticket = begin(prefill_client, decode_client, SRC, DST)
        assert only_event(decode_client, ticket).event is EventKind.LANDED
        assert (dst.words[DST] == words_of(3)[:, None]).all()
