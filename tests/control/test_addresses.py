"""Addresses: what may be bound, what is advertised, what may be connected to."""

from __future__ import annotations

import re

import pytest

from kvxfer.control.channel import REMOTE, Connection, PeerListener
from kvxfer.errors import ConfigError, ProtocolError
from tests.control.waiting import INCARNATION, next_frame, port_of


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
    with PeerListener(host, 0) as listener, Connection(listener.endpoint, INCARNATION) as connection:
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
def test_an_address_that_cannot_be_is_refused_at_start(host: str, port: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PeerListener(host, port)


def test_a_taken_port_is_refused_with_a_remedy() -> None:
    told = r"port: \d+ .* is taken: choose another, or 0"
    with PeerListener("127.0.0.1", 0) as first, pytest.raises(ConfigError, match=told):
        PeerListener("127.0.0.1", port_of(first))


def test_a_wildcard_needs_leave_and_a_real_address_to_advertise() -> None:
    with pytest.raises(ConfigError, match="set allow_wildcard and advertise_host"):
        PeerListener("0.0.0.0", 0, allow_wildcard=True)
    with pytest.raises(ConfigError, match="advertise_host: got '::', expected an address that peers can reach"):
        PeerListener("0.0.0.0", 0, allow_wildcard=True, advertise_host="::")
    with PeerListener("0.0.0.0", 0, allow_wildcard=True, advertise_host="127.0.0.1") as listener:
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
        Connection(endpoint, INCARNATION)


def test_a_link_local_endpoint_with_its_zone_is_understood() -> None:
    Connection("tcp://[fe80::1%lo]:4711", INCARNATION).close()
