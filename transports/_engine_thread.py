"""The one thread that posts writes to an asynchronous engine and watches them end.

Engines are called from here only while writes are under way, so the agent's loop never waits for one. The thread
blocks while nothing is outstanding and sleeps between two looks at the engine otherwise: a loop that spins starves
the engine's own progress threads.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvxfer.transports._completions import CompletionQueue
from kvxfer.transports._regions import CheckedWrite
from kvxfer.transports.base import Completion, Counters, Outcome

# Between two looks the thread sleeps for a share of the time in which nothing has moved: a write is seen to end a
# little after it did, and one that is stuck costs next to nothing.
_SLEEP_SHARE = 0.02
_MIN_SLEEP_S = 50e-6
_MAX_SLEEP_S = 5e-3


class EngineError(Exception):
    """An engine's error, mapped: what became of the part of a write that it concerns."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


class PostingEngine(Protocol):
    """What the thread needs of an engine. All methods raise `EngineError` alone."""

    max_post_entries: int
    """Entries in one `post`; longer writes are cut."""
    max_peer_entries: int
    """Entries in flight to one peer."""

    def is_ready(self, peer: str) -> bool:
        """Whether `post` to `peer` would not block. It is asked until it says yes, for a while at most."""
        ...

    def post(self, peer: str, entries: CheckedWrite) -> int | None:
        """Start moving `entries`; a token to `check`, or None where they have arrived already."""
        ...

    def check(self, token: int) -> bool:
        """Whether what `token` stands for has arrived; the token is used up then, and after a fault."""
        ...

    def abandon(self, token: int) -> None:
        """Give up watching what `token` stands for; it may go on until the engine object is destroyed."""
        ...


@dataclass(slots=True)
class _Write:
    write_id: int
    peer: str
    entries: CheckedWrite
    num_posted: int = 0  # entries [0, num_posted) were handed to the engine
    num_parts: int = 0  # parts in flight
    ended: bool = False

    @property
    def all_posted(self) -> bool:
        return self.num_posted == self.entries.num_entries


@dataclass(slots=True)
class _Part:
    write: _Write
    token: int
    num_entries: int


@dataclass(slots=True)
class _PeerQueue:
    waiting: deque[_Write] = field(default_factory=deque)  # in order of submission; the first may be posted in part
    parts: list[_Part] = field(default_factory=list)
    num_entries: int = 0  # in flight, over all parts


class EngineThread:
    """Owns a thread from `start()` to `stop()`; may be started again, with another engine object."""

    _engine: PostingEngine

    def __init__(self, name: str, completions: CompletionQueue, counters: Counters) -> None:
        self._name = name
        self._completions = completions
        self._counters = counters
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._peers: dict[str, _PeerQueue] = {}
        self._thread: threading.Thread | None = None
        self._stop_at_s: float | None = None
        self._patience_s = 0.0

    def start(self, engine: PostingEngine) -> None:
        """Start posting to `engine`, first what earlier runs left unposted."""
        self._engine = engine
        self._stop_at_s = None
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Let posted writes end until none has for `patience_s` seconds; report the others as `UNKNOWN`; join.

        Nothing is posted meanwhile; writes not posted at all stay queued for the next `start()`.
        """
        if self._thread is None:
            return
        self._commands.put(lambda: self._begin_stop(patience_s))
        self._thread.join()
        self._thread = None
        for peer in list(self._peers):
            self._end_posted(peer, "the engine object was destroyed before the write had ended")

    def submit(self, write_id: int, peer: str, entries: CheckedWrite) -> None:
        self._commands.put(partial(self._enqueue, _Write(write_id, peer, entries)))

    def drop(self, peer: str, then: Callable[[], None]) -> None:
        """End every write to `peer`, then call `then`, both on the thread."""

        def command() -> None:
            self._drop(peer, "the peer was dropped")
            then()

        self._commands.put(command)

    def abandon_all(self, detail: str) -> None:
        """End every write that is still queued. The thread is stopped."""
        assert self._thread is None
        for peer in list(self._peers):
            self._drop(peer, detail)

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread, or here while it is stopped; wait for it, raise what it raises."""
        if self._thread is None:
            function()
            return
        done = threading.Event()
        raised: list[Exception] = []

        def command() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - handed to the caller, who waits for it
                raised.append(error)
            finally:
                done.set()

        self._commands.put(command)
        done.wait()
        if raised:
            raise raised[0]

    def _begin_stop(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._stop_at_s = time.monotonic() + patience_s

    def _run(self) -> None:
        moved_at_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if self._stop_at_s is not None:
                outstanding = any(peer.parts for peer in self._peers.values())
                if not outstanding or now_s >= self._stop_at_s:
                    return
            sleep_s = min(max(_SLEEP_SHARE * (now_s - moved_at_s), _MIN_SLEEP_S), _MAX_SLEEP_S)
            self._take_commands(0.0 if self._may_post_now() else sleep_s if self._peers else None)
            for name, peer in list(self._peers.items()):
                moved = self._check_parts(peer)
                if self._stop_at_s is None:
                    moved |= self._post_next(name, peer)
                elif moved:
                    self._stop_at_s = time.monotonic() + self._patience_s
                if moved:
                    moved_at_s = time.monotonic()
                if not peer.waiting and not peer.parts:
                    self._peers.pop(name, None)

    def _may_post_now(self) -> bool:
        return self._stop_at_s is None and any(self._may_post(name, peer) for name, peer in self._peers.items())

    def _take_commands(self, timeout_s: float | None) -> None:
        """Run the commands that are there; wait for one for up to `timeout_s` seconds, for ever with None."""
        if timeout_s != 0.0:
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=timeout_s)()
        while not self._commands.empty():
            self._commands.get()()

    def _enqueue(self, write: _Write) -> None:
        self._peers.setdefault(write.peer, _PeerQueue()).waiting.append(write)

    def _may_post(self, name: str, peer: _PeerQueue) -> bool:
        if not peer.waiting or not self._engine.is_ready(name):
            return False
        # A part longer than what the peer may have in flight waits for an empty wire instead of for ever.
        next_entries = min(self._engine.max_post_entries, _left(peer.waiting[0]))
        return peer.num_entries == 0 or peer.num_entries + next_entries <= self._engine.max_peer_entries

    def _post_next(self, name: str, peer: _PeerQueue) -> bool:
        """Post one part to `peer`: peers take turns, so a long write to one holds up no other."""
        if not self._may_post(name, peer):
            return False
        write = peer.waiting[0]
        entries = write.entries.part(write.num_posted, write.num_posted + self._engine.max_post_entries)
        started_s = time.perf_counter()
        try:
            token = self._engine.post(name, entries) if entries.num_entries else None
        except EngineError as fault:
            self._fail(peer, write, fault)
            return True
        finally:
            self._counters.post_s += time.perf_counter() - started_s
        write.num_posted += entries.num_entries
        if write.all_posted:
            peer.waiting.popleft()
        if token is not None:
            write.num_parts += 1
            peer.num_entries += entries.num_entries
            peer.parts.append(_Part(write, token, entries.num_entries))
        self._end_if_done(write)
        return True

    def _check_parts(self, peer: _PeerQueue) -> bool:
        moved = False
        for part in list(peer.parts):
            try:
                if not self._engine.check(part.token):
                    continue
            except EngineError as fault:
                peer.parts.remove(part)
                self._fail(peer, part.write, fault)
            else:
                peer.parts.remove(part)
                part.write.num_parts -= 1
                self._end_if_done(part.write)
            peer.num_entries -= part.num_entries
            moved = True
        return moved

    def _fail(self, peer: _PeerQueue, write: _Write, fault: EngineError) -> None:
        with contextlib.suppress(ValueError):
            peer.waiting.remove(write)
        # Other parts of the write may be under way still; they make its end unknown whatever this one reported.
        under_way = any(part.write is write for part in peer.parts)
        self._end(write, Outcome.UNKNOWN if under_way else fault.outcome, fault.detail)

    def _end_if_done(self, write: _Write) -> None:
        if write.all_posted and write.num_parts == 0:
            self._end(write, Outcome.DONE, "")

    def _end(self, write: _Write, outcome: Outcome, detail: str) -> None:
        if write.ended:
            return
        write.ended = True
        self._counters.count(outcome, write.entries.num_entries, write.entries.num_bytes)
        self._completions.put(Completion(write.write_id, outcome, detail))

    def _end_posted(self, name: str, detail: str) -> None:
        peer = self._peers[name]
        for part in peer.parts:
            self._engine.abandon(part.token)
            self._end(part.write, Outcome.UNKNOWN, detail)
        peer.parts.clear()
        peer.num_entries = 0
        while peer.waiting and (peer.waiting[0].ended or peer.waiting[0].num_posted):
            self._end(peer.waiting.popleft(), Outcome.UNKNOWN, detail)

    def _drop(self, name: str, detail: str) -> None:
        if name not in self._peers:
            return
        self._end_posted(name, detail)
        for write in self._peers.pop(name).waiting:
            self._end(write, Outcome.FAILED, detail)


def _left(write: _Write) -> int:
    return write.entries.num_entries - write.num_posted
