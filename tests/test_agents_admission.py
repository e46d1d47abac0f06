"""Real agents that do not know each other: the transfer fails at once and says what to do; then they are introduced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvxfer.control.auth import write_secret_key
from kvxfer.control.client import DecodeClient
from kvxfer.control.messages import Source, Ticket, TransferEvent
from kvxfer.control.peer_channel import new_keys
from kvxfer.errors import ConfigError
from kvxfer.ops.config import SecurityConfig
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld
from tests.patience import SOON_S, until
from tests.test_agents import Split

SPLIT = Split()


def _allow(path: Path, *keys: str) -> SecurityConfig:
    path.write_text("".join(f"{key}\n" for key in keys), encoding="ascii")
    path.chmod(0o600)
    return SecurityConfig(allowed_keys_file=str(path))


def _failed(client: DecodeClient, ticket: Ticket) -> TransferEvent:
    """How the transfer failed, which it must do soon."""
    began_s = time.monotonic()
    event = client.wait(ticket, WAIT_S)
    assert time.monotonic() - began_s < SOON_S
    assert event.event is EventKind.FAILED
    return event


def test_an_unlisted_decode_agent_fails_at_once_until_it_is_listed(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        prefill = world.start_prefill("p", security=_allow(tmp_path / "allowed"))
        world.join_prefill("p", SPLIT.sources()[0])
        decode = world.start_decode("d")
        _, client = world.join_decode("d", SPLIT.target(0))
        event = _failed(client, world.begin(8).ticket)
        assert event.reason is Reason.PEER_REFUSED
        assert decode.public_key in event.detail
        assert "add the key to its security.allowed_keys_file" in event.detail
        assert prefill._links._listener.counts.num_refused >= 1
        _allow(tmp_path / "allowed", decode.public_key)
        until(lambda: prefill._links._listener._doorkeeper.admits(decode.public_key), "the file is read again", SOON_S)
        world.move(20)


def test_a_decode_agent_that_is_struck_off_is_given_up(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        write_secret_key(tmp_path / "key", keys := new_keys())
        world.start_prefill("p", security=_allow(tmp_path / "allowed", keys.public), peer_timeout_s=2.0)
        world.join_prefill("p", SPLIT.sources()[0])
        decode = world.start_decode("d", security=SecurityConfig(key_file=str(tmp_path / "key")))
        assert decode.public_key == keys.public
        _, client = world.join_decode("d", SPLIT.target(0))
        world.move(20)
        request = world.begin(8)
        _allow(tmp_path / "allowed")
        assert _failed(client, request.ticket).reason is Reason.PEER_LOST
        assert _failed(client, world.begin(8).ticket).reason is Reason.PEER_REFUSED


def test_a_decode_agent_goes_to_known_prefill_agents_only(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        prefill = world.start_prefill("p")
        world.join_prefill("p", SPLIT.sources()[0])
        decode = world.start_decode("d", security=_allow(tmp_path / "allowed"))
        _, client = world.join_decode("d", SPLIT.target(0))
        event = _failed(client, world.begin(8).ticket)
        assert prefill.public_key in event.detail
        assert "is not in this agent's security.allowed_keys_file" in event.detail
        assert prefill._links._listener.counts.num_accepted == 0
        _allow(tmp_path / "allowed", prefill.public_key)
        allowed = decode._links._credentials.allowed
        until(lambda: allowed is not None and prefill.public_key in allowed, "the file is read again", SOON_S)
        world.move(20)


@pytest.mark.parametrize("key", ["", new_keys().public], ids=["none", "another"])
def test_a_forged_ticket_does_not_reach_the_agent_that_it_names(tmp_path: Path, key: str) -> None:
    with AgentWorld(tmp_path) as world:
        prefill = world.start_prefill("p")
        world.join_prefill("p", SPLIT.sources()[0])
        world.start_decode("d")
        _, client = world.join_decode("d", SPLIT.target(0))
        world.move(20)
        forged = Source(endpoint=prefill.endpoint, incarnation="a" * 32, key=key)
        event = _failed(client, _open_forged(client, forged))
        assert "key" in event.detail
        assert prefill._links._listener.counts.num_admitted == 2  # the honest one, its messages and its heartbeats
        world.move(20)


def _open_forged(client: DecodeClient, source: Source) -> Ticket:
    ticket = Ticket(transfer="b" * 32, sources=(source,))
    client.open(ticket, {}, deadline_s=60)
    return ticket


def test_an_agent_for_other_hosts_does_not_start_without_an_allow_list(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world, pytest.raises(ConfigError, match=r"security.allowed_keys_file: got nothing"):
        world.start_prefill("p", listen_host="0.0.0.0", advertise_host="127.0.0.1")
    with AgentWorld(tmp_path) as world:
        security = _allow(tmp_path / "allowed")
        agent = world.start_prefill("p", listen_host="0.0.0.0", advertise_host="127.0.0.1", security=security)
        assert agent.endpoint.startswith("tcp://127.0.0.1:")
