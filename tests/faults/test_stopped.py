"""An agent is stopped in the middle of a transfer, everything of that transfer is used again, then it continues.

Over each engine, with real processes. No late byte may appear in a page, nor in a slot that is in use again.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.control.messages import Ticket
from kvxfer.ops.config import TransferMode, TransportName
from kvxfer.transfer import EventKind, Reason
from tests.faults.stage import (
    DEADLINE_S,
    NUM_TOKENS,
    PAGES,
    PEER_TIMEOUT_S,
    POISON,
    AgentProcess,
    Pool,
    Stage,
    begin,
    only_event,
    wait_until,
    words_of,
)

_NIXL, _MOONCAKE = pytest.mark.nixl, pytest.mark.mooncake
ENGINES = [
    pytest.param("loopback", "", id="loopback"),
    pytest.param("nixl", "", id="nixl", marks=_NIXL),
    pytest.param("nixl", "tcp", id="nixl-tcp", marks=_NIXL),
    pytest.param("mooncake", "", id="mooncake", marks=_MOONCAKE),
]
# The agent's clock ticks ten times a second; the rest is for a machine that is busy with other things.
SLACK_S = 1.5
LATE_S = 1.5  # after SIGCONT, for whatever still comes
SRC, DST = PAGES[:NUM_TOKENS], PAGES[::-1][:NUM_TOKENS]


def _stop_in_the_middle(
    victim: AgentProcess,
    prefill: tuple[Pool, PrefillClient],
    decode: tuple[Pool, DecodeClient],
) -> tuple[Ticket, float]:
    """A transfer of salt 1 whose agent was stopped before all rows were in their pages; and when it began."""
    src, prefill_client = prefill
    dst, decode_client = decode
    src.fill(SRC, 1)
    for _ in range(10):
        dst.words[:] = POISON
        began_s = time.monotonic()
        ticket = begin(prefill_client, decode_client, SRC, DST, DEADLINE_S)
        wait_until(lambda: dst.num_begun(DST) > NUM_TOKENS // 8, "the first rows land")
        victim.stop()
        time.sleep(0.1)  # the other agent scatters what has reached it
        if dst.num_begun(DST) < NUM_TOKENS * 3 // 4:
            return ticket, began_s
        victim.go_on()  # it was too late: nearly everything was there
        only_event(decode_client, ticket)
        only_event(prefill_client, ticket)
    raise AssertionError("the transfer could not be stopped in its middle")


def _move(
    prefill: tuple[Pool, PrefillClient],
    decode: tuple[Pool, DecodeClient],
    salt: int,
    src_pages: npt.NDArray[np.int64] = SRC,
) -> None:
    """A transfer that goes well and is exact."""
    src, prefill_client = prefill
    dst, decode_client = decode
    src.fill(src_pages, salt)
    ticket = begin(prefill_client, decode_client, src_pages, DST)
    landed = only_event(decode_client, ticket)
    assert landed.event is EventKind.LANDED, landed
    assert prefill_client.wait(ticket, DEADLINE_S).event is EventKind.SENT
    _check(dst, salt)


def _check(dst: Pool, salt: int) -> None:
    """Every word of every page of the transfer, and nothing on the other pages."""
    expected = np.full(dst.words.shape[0], POISON, dtype=np.uint32)
    expected[DST] = words_of(salt)
    wrong = np.flatnonzero((dst.words != expected[:, None]).any(axis=1))
    assert wrong.size == 0, f"{wrong.size} pages differ, the first is page {wrong[0]}"


@pytest.mark.parametrize(("transport", "tls"), ENGINES)
def test_a_stopped_writer_reaches_nothing_that_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: TransportName, tls: str
) -> None:
    """Pages are used by the next transfer at once; landing slots that it was lent move to other memory first."""
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    with Stage(tmp_path, transport) as stage:
        victim, src, prefill_client = stage.prefill("p0")
        _, other_src, other_client = stage.prefill("p1")
        receiver, dst, decode_client = stage.decode("d0")
        stopped, healthy, decode = (src, prefill_client), (other_src, other_client), (dst, decode_client)
        _move(stopped, decode, 8)
        _move(healthy, decode, 9)
        ticket, began_s = _stop_in_the_middle(victim, stopped, decode)
        (slots_before,) = receiver.slots()
        event = only_event(decode_client, ticket)
        assert event.event is EventKind.FAILED
        assert event.reason is Reason.DEADLINE
        assert time.monotonic() - began_s < DEADLINE_S + SLACK_S
        _move(healthy, decode, 2)  # into the very same pages, while the stopped one still holds credits
        wait_until(lambda: slots_before not in receiver.slots(), "the slots move", PEER_TIMEOUT_S + SLACK_S)
        _move(healthy, decode, 3)  # through all slots
        slot_bytes = receiver.slot_bytes()
        victim.go_on()
        assert only_event(prefill_client, ticket).event is EventKind.FAILED
        time.sleep(LATE_S)
        _check(dst, 3)
        assert receiver.slot_bytes() == slot_bytes
        _move(stopped, decode, 4)
        _move(healthy, decode, 5)


@pytest.mark.parametrize("mode", ["packed", "raw"])
@pytest.mark.parametrize(("transport", "tls"), ENGINES)
def test_a_stopped_target_gets_nothing_of_what_its_source_holds_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: TransportName, tls: str, mode: TransferMode
) -> None:
    """Source pages and sender slots are overwritten by transfers to another decode agent while the first is stopped."""
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    with Stage(tmp_path, transport) as stage:
        _, src, prefill_client = stage.prefill("p0", mode)
        victim, dst, decode_client = stage.decode("d0")
        _, other_dst, other_client = stage.decode("d1")
        prefill = (src, prefill_client)
        stopped, healthy = (dst, decode_client), (other_dst, other_client)
        _move(prefill, stopped, 8)
        _move(prefill, healthy, 9)
        ticket, began_s = _stop_in_the_middle(victim, prefill, stopped)
        event = only_event(prefill_client, ticket)
        assert event.event is EventKind.FAILED
        assert event.reason is Reason.DEADLINE
        assert time.monotonic() - began_s < DEADLINE_S + SLACK_S
        _move(prefill, healthy, 2)  # out of the very same pages
        time.sleep(max(0.0, began_s + PEER_TIMEOUT_S + SLACK_S - time.monotonic()))
        _move(prefill, healthy, 3)  # through all slots, also those whose writes had no end
        before = dst.words[:, 0].copy()
        victim.go_on()
        assert only_event(decode_client, ticket).event is EventKind.FAILED
        after_end = dst.words.copy()
        time.sleep(LATE_S)
        assert np.array_equal(dst.words, after_end)
        _check_only(dst, 1)
        assert np.count_nonzero(before[DST] != POISON) < NUM_TOKENS
        dst.words[:] = POISON
        _move(prefill, stopped, 4)
        _move(prefill, healthy, 5)


def _check_only(dst: Pool, salt: int) -> None:
    """Each page of the transfer holds the whole row of `salt`, or nothing; the others hold nothing."""
    expected = np.full(dst.words.shape[0], POISON, dtype=np.uint32)
    expected[DST] = words_of(salt)
    is_row = (dst.words == expected[:, None]).all(axis=1)
    is_poison = (dst.words == POISON).all(axis=1)
    assert (is_row | is_poison).all(), f"pages {np.flatnonzero(~(is_row | is_poison))} hold something else"
