"""A small HTTP server for probes and metrics: GET alone, a few fixed pages, everything bounded.

One thread serves all connections and waits for none of them. Whoever floods it with connections is served at its pace,
which leaves the agent's loop alone; connections that say nothing make room for those that do.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvxfer.control.address import bind_error, is_wildcard, resolve
from kvxfer.errors import ConfigError
from kvxfer.ops.config import OpsConfig

MAX_CONNECTIONS = 32
TIMEOUT_S = 2.0
_MAX_ACCEPTS_PER_TURN = 4
_PAUSE_S = 0.005  # between two turns: at most 800 connections a second
_MAX_REQUEST_BYTES = 8192
_BACKLOG = 128
_TEXT = "text/plain; charset=utf-8"
_PHRASES = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered to one path."""

    status: int
    body: bytes
    content_type: str = _TEXT


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    until_s: float
    request: bytes = b""
    answer: bytes = b""  # what is still to be sent


def listen(config: OpsConfig) -> socket.socket:
    """A socket that listens where `config` says. Raises `ConfigError`, which names the key."""
    host, port = config.listen_host, config.listen_port
    address = resolve(host, "ops.listen_host")
    if is_wildcard(address) and not config.allow_wildcard:
        raise ConfigError(
            f"ops.listen_host: got {host!r}, expected one named address: a wildcard listens on every network; "
            "where that is meant, set ops.allow_wildcard = true"
        )
    family, kind, protocol, _, bind_to = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(bind_to)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"ops.listen_{bind_error(host, port, error.errno, error.strerror or '')}") from error
    listener.setblocking(False)
    return listener


class PageServer:
    """Serves `pages`, by path, on a thread of its own until `close()`. Owns the listener it is given.

    A page is made anew for each request, on that thread. `endpoint` is `ADDRESS:PORT`.
    """

    def __init__(self, listener: socket.socket, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._listener = listener
        self._pages = {path.encode("ascii"): make for path, make in pages.items()}
        host, port = listener.getsockname()[:2]
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._stop_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvxfer-ops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody and give everything back. Calling it again does nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        for connection in list(self._connections.values()):
            self._hang_up(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._stop_fd)

    def _run(self) -> None:
        while not self._is_stopping:
            ready = self._selector.select(TIMEOUT_S / 4 if self._connections else None)
            for key, _ in ready:
                connection = self._connections.get(key.fd)
                if key.fileobj is self._listener:
                    self._accept()
                elif connection is not None:
                    self._look(connection)
            now_s = time.monotonic()
            for connection in [each for each in self._connections.values() if now_s >= each.until_s]:
                self._hang_up(connection)
            time.sleep(_PAUSE_S)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return  # nobody is left, the one who was has gone, or the process has no descriptor for it
            if len(self._connections) >= MAX_CONNECTIONS:
                self._hang_up(next(iter(self._connections.values())))
            accepted.setblocking(False)
            self._connections[accepted.fileno()] = _Connection(accepted, time.monotonic() + TIMEOUT_S)
            self._selector.register(accepted, selectors.EVENT_READ)

    def _look(self, connection: _Connection) -> None:
        """Read on, or write on."""
        try:
            if not connection.answer:
                received = connection.socket.recv(_MAX_REQUEST_BYTES)
                connection.request += received
                is_whole = b"\r\n\r\n" in connection.request
                if not received or (not is_whole and len(connection.request) > _MAX_REQUEST_BYTES):
                    self._hang_up(connection)
                    return
                if not is_whole:
                    return
                connection.answer = _response(self._page(connection.request))
                self._selector.modify(connection.socket, selectors.EVENT_WRITE)
            connection.answer = connection.answer[connection.socket.send(connection.answer) :]
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(connection)
            return
        if not connection.answer:
            self._hang_up(connection)

    def _page(self, request: bytes) -> Page:
        words = request.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return Page(400, b"expected an HTTP request\n")
        if words[0] != b"GET":
            return Page(405, b"expected GET\n")
        make = self._pages.get(words[1].partition(b"?")[0])
        return Page(404, b"no such page\n") if make is None else make()

    def _hang_up(self, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _response(page: Page) -> bytes:
    head = [
        f"HTTP/1.1 {page.status} {_PHRASES[page.status]}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Allow: GET"] if page.status == 405 else []),
    ]
    return "\r\n".join([*head, "", ""]).encode("ascii") + page.body
