"""The server of the pages: what it answers, where it listens, and that nobody can keep it busy."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from kvxfer.errors import ConfigError
from kvxfer.ops.config import OpsConfig
from kvxfer.ops.server import MAX_CONNECTIONS, TIMEOUT_S, Page, PageServer, listen
from tests.ops.http_get import TIMEOUT_S as WAIT_S
from tests.ops.http_get import get, raw

_LONG = b"x" * (4 << 20)  # more than any socket buffers


@pytest.fixture
def server() -> Iterator[PageServer]:
    pages = {
        "/ok": lambda: Page(200, b"fine\n"),
        "/bad": lambda: Page(503, b"why\n"),
        "/long": lambda: Page(200, _LONG),
    }
    server = PageServer(listen(OpsConfig(listen_host="127.0.0.1")), pages)
    yield server
    server.close()
    server.close()


def test_pages(server: PageServer) -> None:
    assert get(server.endpoint, "/ok") == (200, "fine\n")
    assert get(server.endpoint, "/ok?verbose=1") == (200, "fine\n")
    assert get(server.endpoint, "/bad") == (503, "why\n")
    assert get(server.endpoint, "/long")[1] == _LONG.decode()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /ok HTTP/1.1\r\n\r\n", b"405"),
        (b"HEAD /ok HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /secret<script> HTTP/1.1\r\nHost: secret\r\n\r\n", b"404"),
        (b"GET /ok\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /ok SPDY/3\r\n\r\n", b"400"),
        (b"\xff\x00 \x80 HTTP/1.1\r\n\r\n", b"405"),
    ],
)
def test_everything_else_is_refused_and_nothing_of_it_comes_back(
    server: PageServer, request_bytes: bytes, status: bytes
) -> None:
    answer = raw(server.endpoint, request_bytes)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"secret" not in answer
    assert get(server.endpoint, "/ok") == (200, "fine\n")


@pytest.mark.parametrize("request_bytes", [b"GET /" + b"a" * 20_000, b"\x16\x03\x01" + b"\0" * 20_000])
def test_a_request_without_an_end_is_hung_up_on(server: PageServer, request_bytes: bytes) -> None:
    host, _, port = server.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(request_bytes)
        try:
            assert connection.recv(100) == b""
        except ConnectionResetError:
            return  # it had not read all of it
    assert get(server.endpoint, "/ok") == (200, "fine\n")


def test_a_connection_that_says_nothing_is_hung_up_on_in_time(server: PageServer) -> None:
    host, _, port = server.endpoint.rpartition(":")
    began_s = time.monotonic()
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(b"GET /ok HT")
        assert connection.recv(100) == b""
    assert time.monotonic() - began_s >= TIMEOUT_S - 0.1


def test_many_idle_connections_keep_nobody_out(server: PageServer) -> None:
    host, _, port = server.endpoint.rpartition(":")
    idle = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(3 * MAX_CONNECTIONS)]
    num_descriptors = len(os.listdir("/proc/self/fd"))
    assert get(server.endpoint, "/ok") == (200, "fine\n")
    assert len(os.listdir("/proc/self/fd")) - num_descriptors <= MAX_CONNECTIONS
    for connection in idle:
        connection.close()


def test_a_reader_that_stops_reading_holds_up_nobody(server: PageServer) -> None:
    host, _, port = server.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        assert connection.recv(100)
        assert get(server.endpoint, "/ok") == (200, "fine\n")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_needs_to_be_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^ops\.listen_host: got '.*expected one named address"):
        listen(OpsConfig(listen_host=host))
    listen(OpsConfig(listen_host=host, allow_wildcard=True)).close()


def test_addresses_that_cannot_be_had(server: PageServer) -> None:
    port = int(server.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"^ops\.listen_port: {port} on '127.0.0.1' is taken"):
        listen(OpsConfig(listen_host="127.0.0.1", listen_port=port))
    with pytest.raises(ConfigError, match=r"^ops\.listen_host: got '192.0.2.1', expected an address of this machine"):
        listen(OpsConfig(listen_host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"^ops\.listen_host: got 'no such host'"):
        listen(OpsConfig(listen_host="no such host"))


def test_ipv6() -> None:
    server = PageServer(listen(OpsConfig(listen_host="[::1]")), {"/ok": lambda: Page(200, b"fine\n")})
    try:
        assert server.endpoint.startswith("[::1]:")
        with socket.create_connection(("::1", int(server.endpoint.rpartition(":")[2])), WAIT_S) as connection:
            connection.sendall(b"GET /ok HTTP/1.1\r\n\r\n")
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        server.close()
