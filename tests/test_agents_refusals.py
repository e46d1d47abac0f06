"""What real agents refuse: peers that are not there or do not fit, tickets of nobody, workers too many."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvxfer.control.auth import write_secret_key
from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.control.heartbeat import Heartbeat
from kvxfer.control.ids import new_id
from kvxfer.control.messages import Source, Ticket
from kvxfer.control.peer_channel import Connection, new_keys
from kvxfer.decode import links
from kvxfer.errors import ControlError, RefusedError
from kvxfer.layout import Placement, PoolLayout, Shard
from kvxfer.memory import HostMemory
from kvxfer.ops.config import SecurityConfig
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld, receive_pages
from tests.patience import SOON_S, until
from tests.test_agents import Split, build
from tests.test_agents_ends import ends
from tests.wire_world import GUARD_BYTES, Geometry, GroupSpec, make_layout


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        world.start_decode("d0", peer_timeout_s=0.5)
        seat, client = world.join_decode("d0", Split().target(0))
        source = Source(endpoint="tcp://127.0.0.1:9", incarnation=new_id(), key=new_keys().public)
        ticket = Ticket(transfer=new_id(), sources=(source,))
        target = seat.take_pages(world.ranges(seat.layout, 0, 8))
        client.open(ticket, receive_pages(target))
        event = ends(client, ticket)
        assert event.reason is Reason.PEER_UNREACHABLE
        assert "tcp://127.0.0.1:9: did not pair within 0.5 s" in event.detail
        world.verify()


def test_an_agent_that_can_open_no_channel_fails_the_transfer_and_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first socket of a connection nor, with that open, the first of its heartbeats."""
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        (seat, client), source = world.decode[0], world.prefill[0][1].source
        opened: list[Connection] = []

        def open_until(refused: type[Connection], kind: type[Connection], *args: Any) -> Connection:  # noqa: ANN401
            if kind is refused:
                raise ControlError("cannot open a channel: Too many open files")
            opened.append(kind(*args))
            return opened[-1]

        for refused in (Connection, Heartbeat):
            with monkeypatch.context() as patch:
                for kind in (Connection, Heartbeat):
                    patch.setattr(links, kind.__name__, partial(open_until, refused, kind))
                ticket = Ticket(transfer=new_id(), sources=(source,))
                client.open(ticket, receive_pages(seat.take_pages(world.ranges(seat.layout, 0, 8))))
                event = ends(client, ticket)
            assert event.reason is Reason.PEER_UNREACHABLE
            assert event.detail == "cannot open a channel: Too many open files"
        assert [each.is_closed for each in opened] == [True]
        world.move(20)


def test_an_agent_without_a_worker_says_so_at_once_and_serves_the_next(tmp_path: Path) -> None:
    """It is running and reachable: the ticket's worker is what is gone."""
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        layout = Split().target(0)
        (seat, client), (_, prefill) = world.decode[0], world.prefill.pop()
        ticket = prefill.ticket()
        prefill.close()
        agent = world.threads[tmp_path / "p0"].agent
        until(lambda: agent._sidecar.pool is None, "the worker is gone")
        began_s = time.monotonic()
        client.open(ticket, receive_pages(seat.take_pages(world.ranges(layout, 0, 8))))
        event = ends(client, ticket)
        assert time.monotonic() - began_s < SOON_S
        assert event.reason is Reason.WORKER_LOST
        assert "it runs, but the worker that made the ticket is gone" in event.detail
        world.join_prefill("p0", layout)
        world.move(20)


@pytest.mark.parametrize("home", [True, False])
def test_a_ticket_that_nobody_made_is_refused_at_once(tmp_path: Path, home: bool) -> None:
    """A right agent with a made-up transfer, and an endpoint whose agent is another by now."""
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        (seat, client), source = world.decode[0], world.prefill[0][1].source
        if not home:
            source = Source(endpoint=source.endpoint, incarnation=new_id(), key=source.key)
        ticket = Ticket(transfer=new_id(), sources=(source,))
        began_s = time.monotonic()
        client.open(ticket, receive_pages(seat.take_pages(world.ranges(seat.layout, 0, 8))))
        assert ends(client, ticket).reason is (Reason.UNKNOWN_TRANSFER if home else Reason.STALE)
        assert time.monotonic() - began_s < SOON_S
        world.move(20)


OTHER_ROWS = make_layout((GroupSpec("kv", Placement.SHARDED, 3, 25),), Geometry(4), 64, Shard())
OTHER_NAME = make_layout((GroupSpec("kw", Placement.SHARDED, 3, 24),), Geometry(4), 64, Shard())


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (OTHER_ROWS, ("layout", "row_bytes", "got 24", "expected 25")),
        (OTHER_NAME, ("layout", "groups", "'kv'", "'kw'")),
    ],
)
def test_layouts_that_do_not_fit_are_refused_at_pairing(
    tmp_path: Path, layout: PoolLayout, named: tuple[str, ...]
) -> None:
    """Field, got and expected; nothing is written, and a fitting decode agent beside it is served."""
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        world.start_decode("odd")
        seat, client = world.join_decode("odd", layout)
        world.decode.pop()
        ticket = world.prefill[0][1].ticket()
        client.open(ticket, receive_pages(seat.take_pages(world.ranges(layout, 0, 8))))
        event = ends(client, ticket)
        assert event.reason is Reason.LAYOUT_MISMATCH
        for word in named:
            assert word in event.detail
        assert (seat.memory.array == seat.expected).all()
        world.move(20)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_second_worker_is_refused_and_the_first_goes_on(tmp_path: Path, name: str) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        layout = Split().target(0)
        num_bytes = layout.groups[0].extent_bytes + GUARD_BYTES
        connect: Callable[..., object] = PrefillClient.connect if name == "p0" else DecodeClient.connect
        with HostMemory.create(num_bytes, "second") as memory:
            for _ in range(2):
                with pytest.raises(RefusedError, match="another worker's pool"):
                    connect(tmp_path / name, memory, layout, timeout_s=WAIT_S)
        world.move(20)


@pytest.mark.parametrize("has_key_file", [True, False])
def test_a_restarted_prefill_agent_is_another_peer_at_the_same_address(tmp_path: Path, has_key_file: bool) -> None:
    """An old ticket is refused at once; a new one works, also while the old one is being refused.

    With its key kept in a file the new run is told apart by its incarnation, otherwise by its key already.
    """
    security = SecurityConfig(key_file=str(tmp_path / "key") if has_key_file else "")
    if has_key_file:
        write_secret_key(tmp_path / "key", new_keys())
    with AgentWorld(tmp_path) as world:
        layout = Split().target(0)
        world.start_prefill("p0", security=security)
        world.join_prefill("p0", layout)
        world.start_decode("d0")
        world.join_decode("d0", layout)
        world.move(10)
        old = world.begin(20)
        endpoint = world.prefill.pop()[1].source.endpoint
        world.end_agent("p0")
        assert ends(world.decode[0][1], old.ticket).event is EventKind.FAILED
        world.start_prefill("p0", listen_port=int(endpoint.rpartition(":")[2]), security=security)
        world.join_prefill("p0", layout)
        assert world.prefill[0][1].source.endpoint == endpoint
        seat, client = world.decode[0]
        late = Ticket(transfer=new_id(), sources=old.ticket.sources)
        for _ in range(3):
            client.open(late, receive_pages(seat.take_pages(world.ranges(layout, 0, 4))))
            world.move(12, salt=4)
            assert ends(client, late).reason is (Reason.STALE if has_key_file else Reason.PEER_REFUSED)
