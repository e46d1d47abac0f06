"""One Mooncake engine object, its start-up, and its errors.

Writes are submitted entry by entry: of all of Mooncake's calls these alone never block, say which entry failed, and
need no spinning to watch. An entry is reported done only after the target has acknowledged it.
"""

from __future__ import annotations

import importlib
import ipaddress
import itertools
import os
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import msgspec

from kvxfer.errors import ConfigError, EngineMissingError, TransportError
from kvxfer.transports._engine_thread import EngineError
from kvxfer.transports._metadata import Metadata
from kvxfer.transports._mooncake_scout import Question, ask
from kvxfer.transports._nixl_engine import has_rdma_device
from kvxfer.transports._regions import CheckedWrite
from kvxfer.transports._tcp_probe import acknowledged_tcp_bytes
from kvxfer.transports.base import Outcome, Region

# A stalled connection is cut after this time. Without it, what a stopped target takes in later comes from the source
# as it is then: 62.9 of 67.1 MB were bytes written after the failure.
PROGRESS_TIMEOUT_S = 2
# Mooncake's queue to one peer holds 1024 entries; what a failed write left behind in it counts too.
MAX_PEER_ENTRIES = 512
MAX_POST_ENTRIES = 128
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_ANSWER_S = 2.0
_MIN_PROBE_BYTES = 1 << 16
_RUNNING, _DONE = 0, 1
_PACKAGES = "mooncake-cpu (no CUDA), mooncake (CUDA 12) or mooncake-cuda13"


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`protocol`: what Mooncake is asked for; `tcp` or `rdma`. See `path()` for what it really uses."""

    protocol: Literal["tcp", "rdma"] = "tcp"


def load_mooncake(options: MooncakeOptions) -> ModuleType:
    """Import Mooncake after setting what it reads. Variables that are set already are kept.

    Raises `EngineMissingError` where it or a library that it loads is missing, `ConfigError` for a protocol that this
    host lacks: Mooncake itself would run TCP and say nothing.
    """
    if options.protocol == "rdma" and not has_rdma_device():
        raise ConfigError("transport.options.protocol: got 'rdma', expected 'tcp': this host has no RDMA device")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_TIMEOUT_S))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "3")
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise EngineMissingError(
            f"transport 'mooncake': the package is not installed; pip install 'kvxfer[EXTRA]', EXTRA one of {_PACKAGES}"
        ) from error
    except ImportError as error:
        raise EngineMissingError(
            f"transport 'mooncake': a system library is missing: {error}. libibverbs.so.1 comes with the package "
            "libibverbs1 (Debian, Ubuntu) or libibverbs (Fedora, RHEL)"
        ) from error


@dataclass(slots=True)
class _Post:
    peer: str
    entry_ids: list[int]  # still to be watched, in reverse order of submission
    num_bytes: int
    tcp_bytes_before: int | None  # set where this post is to show which path it takes


@dataclass(slots=True)
class _MooncakePeer:
    metadata: Metadata
    question: Question | None = None  # asked before the first write, answered before the second
    shook_hands: bool = False
    path: str = "unknown"
    num_failures: int = 0  # in a row
    closed_until_s: float = 0.0

    @property
    def session(self) -> str:
        return self.metadata.engine.decode()


class MooncakeEngine:
    """One TransferEngine: what is destroyed and made anew by a rotation."""

    max_post_entries = MAX_POST_ENTRIES
    max_peer_entries = MAX_PEER_ENTRIES

    def __init__(self, module: ModuleType, endpoint: str, host: str, options: MooncakeOptions) -> None:
        self.endpoint = endpoint
        self._module = module
        self._host = host
        self._engine: Any = module.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", options.protocol, "")
        if code != 0:
            raise TransportError(f"Mooncake does not start at {host} with {options.protocol}: it returned {code}")
        # The engine chooses its port: what peers are told is what was bound.
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._peers: dict[str, _MooncakePeer] = {}
        self._session_owners: dict[str, str] = {}  # endpoint that a session led to when this object first met it
        self._posts: dict[int, _Post] = {}
        self._abandoned: dict[str, list[int]] = {}  # by session: entries nobody waits for, still in its queue
        self._tokens = itertools.count(1)

    def register(self, region: Region) -> None:
        code = self._engine.register_memory(region.address, region.num_bytes)
        if code != 0:
            raise EngineError(Outcome.FAILED, f"Mooncake refused to register {region.num_bytes} bytes: code {code}")

    def deregister(self, region: Region) -> None:
        code = self._engine.unregister_memory(region.address)
        if code != 0:
            raise EngineError(Outcome.FAILED, f"Mooncake refused to deregister {region.num_bytes} bytes: code {code}")

    def metadata(self) -> bytes:
        return self._session.encode()

    def add_peer(self, peer: str, metadata: Metadata) -> None:
        _check_session(metadata.engine)
        added = _MooncakePeer(metadata)
        self._session_owners[added.session] = metadata.endpoint
        self._peers[peer] = added

    def drop_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def is_stale_for(self, metadata: Metadata) -> bool:
        # The data port of a session is cached for ever: after a restart on the same port every write fails. And what
        # was given up can sit in a session's queue for minutes: each entry waits for a connection to be tried again.
        session = metadata.engine.decode(errors="replace")
        return (
            bool(self._abandoned.get(session))
            or self._session_owners.get(session, metadata.endpoint) != metadata.endpoint
        )

    def path(self, peer: str) -> str:
        return self._peers[peer].path if peer in self._peers else "unknown"

    def is_ready(self, peer: str) -> bool:
        state = self._peers[peer]
        if state.shook_hands:
            return True
        if state.question is None:
            state.question = ask(self._module, self._host, state.session)
        return state.question.code is not None or time.monotonic() - state.question.asked_at_s > _ANSWER_S

    def post(self, peer: str, entries: CheckedWrite) -> int:
        state = self._peers[peer]
        self._check_may_post(state)
        self._shake_hands(state)
        probe = state.path == "unknown" and not self._posts and entries.num_bytes >= _MIN_PROBE_BYTES
        post = _Post(peer, [], entries.num_bytes, acknowledged_tcp_bytes() if probe else None)
        for src, dst, length in entries.rows():
            entry_id = self._engine.transfer_submit_write(state.session, src, dst, length)
            if entry_id <= 0:
                self._let_go(state, post.entry_ids)
                outcome = Outcome.UNKNOWN if post.entry_ids else Outcome.FAILED
                raise self._failure(state, outcome, f"did not take an entry: {entry_id}")
            post.entry_ids.append(entry_id)
        post.entry_ids.reverse()
        token = next(self._tokens)
        self._posts[token] = post
        return token

    def check(self, token: int) -> bool:
        post = self._posts[token]
        state = self._peers[post.peer]
        while post.entry_ids:
            status = self._engine.transfer_check_status(post.entry_ids[-1])
            if status == _RUNNING:
                return False
            # Its id is used up: asking for it again would crash the process.
            post.entry_ids.pop()
            if status != _DONE:
                del self._posts[token]
                self._let_go(state, post.entry_ids)
                raise self._failure(state, Outcome.UNKNOWN, f"reported status {status} for an entry")
        del self._posts[token]
        state.num_failures = 0
        if post.tcp_bytes_before is not None:
            sent_bytes = acknowledged_tcp_bytes() - post.tcp_bytes_before
            state.path = "tcp" if sent_bytes >= post.num_bytes else "unknown"
        return True

    def abandon(self, token: int) -> None:
        post = self._posts.pop(token)
        if post.peer in self._peers:
            self._let_go(self._peers[post.peer], post.entry_ids)

    def _let_go(self, state: _MooncakePeer, entry_ids: list[int]) -> None:
        self._abandoned.setdefault(state.session, []).extend(entry_ids)

    def _check_may_post(self, state: _MooncakePeer) -> None:
        left = [entry for entry in self._abandoned.pop(state.session, []) if self._is_running(entry)]
        if left:
            self._abandoned[state.session] = left
        if len(left) > MAX_PEER_ENTRIES:
            raise EngineError(Outcome.FAILED, f"Mooncake's queue to {state.session} still holds {len(left)} entries")
        wait_s = state.closed_until_s - time.monotonic()
        if wait_s > 0.0:
            raise EngineError(
                Outcome.FAILED,
                f"{state.num_failures} writes in a row to {state.session} have failed; not tried for {wait_s:.1f} s",
            )

    def _shake_hands(self, state: _MooncakePeer) -> None:
        """Make the session known to the engine object, once the peer has given a sign of life."""
        if state.shook_hands:
            return
        question = state.question
        assert question is not None
        if question.code == 0 and self._engine.get_first_buffer_address(state.session) != 0:
            state.shook_hands = True
            return
        if question.code is not None:
            state.question = None  # the next write asks again
        raise self._failure(state, Outcome.FAILED, f"does not answer (code {question.code})")

    def _is_running(self, entry_id: int) -> bool:
        return bool(self._engine.transfer_check_status(entry_id) == _RUNNING)

    def _failure(self, state: _MooncakePeer, outcome: Outcome, what: str) -> EngineError:
        """Note a failure. The first one in a row closes nothing: the next write may well succeed."""
        state.num_failures += 1
        if state.num_failures > 1:
            backoff_s = min(_MIN_BACKOFF_S * 2 ** (state.num_failures - 2), _MAX_BACKOFF_S)
            state.closed_until_s = time.monotonic() + backoff_s
        return EngineError(outcome, f"Mooncake, session {state.session}: {what}")

    def destroy(self) -> None:
        self._engine = None


def _check_session(session: bytes) -> None:
    host, _, port = session.decode(errors="replace").rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        valid = 0 < int(port) < 1 << 16
    except ValueError:
        valid = False
    if not valid:
        raise EngineError(Outcome.FAILED, f"Mooncake session: got {session[:64]!r}, expected ADDRESS:PORT")
