"""Addresses: what may be bound, what is advertised, what may be connected to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvxfer.control.address import is_loopback
from kvxfer.control.auth import AllowList
from kvxfer.control.channel import REMOTE
from kvxfer.control.peer_channel import Credentials, PeerListener
from kvxfer.errors import ConfigError, ProtocolError
from tests.control.waiting import INCARNATION, LISTENER, connect, next_frame, port_of


@pytest.fixture
def guarded(tmp_path: Path) -> Credentials:
    """With an allow-list, so that any address may be listened on."""
    (tmp_path / "allowed").touch(mode=0o600)
    return Credentials(LISTENER.keys, AllowList(tmp_path / "allowed"))


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:"),
        ("::1", "tcp://[::1]:"),
        ("[::1]", "tcp://[::1]:"),
        ("localhost", "tcp://"),
    ],
)
def test_a_named_address_is_advertised_as_bound(host: str, prefix: str) -> None:
    with PeerListener(host, 0, LISTENER) as listener, connect(listener.endpoint) as connection:
        assert listener.endpoint.startswith(prefix)
        assert port_of(listener) > 0
        assert connection.send(REMOTE, b"hello")
        assert next_frame(listener) == (INCARNATION.encode(), b"hello")
        assert listener.send(INCARNATION.encode(), b"welcome")
        assert next_frame(connection) == (REMOTE, b"welcome")


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("0.0.0.0", 0, "expected one named address"),
        ("::", 0, "expected one named address"),
        ("::ffff:0.0.0.0", 0, "expected one named address"),
        ("*", 0, "host: got"),
        ("", 0, "host: got"),
        ("[]", 0, "host: got"),
        ("9000abc", 0, "host: got"),
        ("192.0.2.1", 0, "expected an address of this machine"),
        ("127.0.0.1", -1, "port: got -1"),
        ("127.0.0.1", 65536, "port: got 65536"),
    ],
)
def test_an_address_that_cannot_be_is_refused_at_start(guarded: Credentials, host: str, port: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PeerListener(host, port, guarded)


def test_a_taken_port_is_refused_with_a_remedy() -> None:
    told = r"port: \d+ .* is taken: choose another, or 0"
    with PeerListener("127.0.0.1", 0, LISTENER) as first, pytest.raises(ConfigError, match=told):
        PeerListener("127.0.0.1", port_of(first), LISTENER)


def test_a_wildcard_needs_leave_and_a_real_address_to_advertise(guarded: Credentials) -> None:
    with pytest.raises(ConfigError, match="set allow_wildcard and advertise_host"):
        PeerListener("0.0.0.0", 0, guarded, allow_wildcard=True)
    with pytest.raises(ConfigError, match="advertise_host: got '::', expected an address that peers can reach"):
        PeerListener("0.0.0.0", 0, guarded, allow_wildcard=True, advertise_host="::")
    with PeerListener("0.0.0.0", 0, guarded, allow_wildcard=True, advertise_host="127.0.0.1") as listener:
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", listener.endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:9000abc",
        "tcp://0.0.0.0:1",
        "tcp://[::]:1",
        "tcp://::1:1",
        "tcp://999.0.0.1:1",
        "tcp://router.example:1",
        "tcp://10.0.0.1:0;127.0.0.1:1",
        "ipc:///run/other.sock",
        "inproc://x",
        "tcp://127.0.0.1:1\n",
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ProtocolError, match=r"^endpoint: got"):
        connect(endpoint)


def test_a_link_local_endpoint_with_its_zone_is_understood() -> None:
    connect("tcp://[fe80::1%lo]:4711").close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%lo", False),
    ],
)
def test_which_addresses_are_reached_from_this_host_alone(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
