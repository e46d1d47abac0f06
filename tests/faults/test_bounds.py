"""What a peer, or a write that nobody can vouch for, must not be able to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.prefill.agent import PrefillAgent
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.loopback import LoopbackTransport
from kvxfer.transports.loopback_options import LoopbackFaults
from tests.agent_world import WAIT_S, AgentWorld
from tests.prefill.driver import PrefillDriver
from tests.test_agents import Split, build


@pytest.mark.parametrize("num_batches", [1, 3])
def test_more_credits_than_were_asked_for_end_the_transfer(num_batches: int) -> None:
    """Otherwise a peer could make this side keep as many as it likes to send."""
    driver = PrefillDriver(num_slots=4)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 64)
    driver.submit(transfer, 0, 64)
    leg = driver.leg(peer, transfer)
    assert leg.num_wanted_sent == 3
    for batch in range(num_batches - 1):
        driver.credit(peer, transfer, batch)
    assert not driver.ends(transfer)
    driver.credit(peer, transfer, *range(4 - num_batches + 1))
    driver.end_gathers()
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.MISMATCH)]
    assert driver.events[-1].detail == "credits: got 4, expected at most 3"
    assert not leg.credits
    assert not driver.writes
    driver.assert_idle()


def test_a_pool_that_an_unproven_raw_write_may_read_is_not_unmapped_before_a_rotation(tmp_path: Path) -> None:
    """The worker goes while such writes are under way; they read the pool 0.4 s later, and would crash the agent."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(), mode="raw")
        world.move(8)
        agent = world.threads[tmp_path / "p0"].agent
        assert isinstance(agent, PrefillAgent)
        transport = agent._sidecar.transport
        assert isinstance(transport, LoopbackTransport)
        transport._faults = LoopbackFaults(late=1.0, late_s=0.4)
        request = world.begin(20)
        world.submit(request, 0, 20)
        seat, client = world.prefill.pop()
        assert client.wait(request.ticket, WAIT_S).reason is Reason.WRITE_UNKNOWN
        assert agent._writes.may_still_read
        num_rotations = transport.counters.num_rotations
        client.close()
        _until(lambda: agent._sidecar.pool is None and not agent._sidecar.desk.seat.is_leaving)
        assert transport.counters.num_rotations == num_rotations + 1
        assert not agent._writes.may_still_read
        assert not transport._writes
        time.sleep(0.5)
        transport._faults = LoopbackFaults()
        world.join_prefill("p0", seat.layout)
        decode_seat = world.decode[0][0]
        decode_seat.expected[:] = decode_seat.memory.array
        world.move(20, salt=3)


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
