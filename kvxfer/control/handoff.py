"""Hand-off of a worker's pool to its agent over a unix socket: one sealed memfd and the layout, or the layout alone.

The worker sends `PoolOffer`; the agent answers `PoolAccepted` or `PoolRefused`. With placement `agent` the pool's
descriptor comes with the offer. With placement `worker` a stream of the worker moves the rows: the pool stays where it
is, and with the answer come the descriptors of the ring and of the agent's slots. The connection then stays open and
all but silent: its end tells either side that the other is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import weakref
from collections import deque

from kvxfer.control.handoff_messages import (
    FrameReader,
    LastWord,
    MoreEntries,
    PeerPool,
    PeerPoolDropped,
    PoolAccepted,
    PoolOffer,
    PoolPreparing,
    PoolRefused,
    SharedStream,
    SlotsMoved,
    decode_word,
    pack,
)
from kvxfer.control.shared_memory import HeldMemory, SharedMemory, attach, describe, share
from kvxfer.control.socket_dir import HANDOFF_SOCKET, socket_path
from kvxfer.control.stream_memory import MovedSlots, OfferedPeer, StreamMemory
from kvxfer.errors import AgentLostError, ControlTimeoutError, HandoffError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool, MappedPool, allocate_pool
from kvxfer.streams.ring import Ring

__all__ = [
    "HandoffConnection",
    "MovedSlots",
    "OfferedPeer",
    "StreamMemory",
    "allocate_pool",
    "hand_over",
    "hand_over_device",
    "share_stream",
]

_CONNECT_RETRY_S = 0.05
_MAX_FRAMES_PER_LOOK = 64


class HandoffConnection:
    """Worker side of a hand-over. Keep it open as long as the agent may use the pool.

    `pool` is the id that the agent gave. The descriptor of the memory stays the caller's.
    """

    def __init__(self, connection: socket.socket, reader: FrameReader, pool: str, prepared_s: float = 0.0) -> None:
        """Take over `connection` and `reader`. Use `hand_over`, `hand_over_device` or `share_stream`."""
        self.pool = pool
        self.prepared_s = prepared_s
        """How long the agent has taken to be able to move rows of a GPU, beside the time for its answer."""
        self.num_events: int | None = None
        """Events that the agent has sent in all, once it has said so because it ends in good order."""
        self.num_entries_wanted = 0
        """Entries that the agent wants this worker's stream to have, counted since the ring was made."""
        self._socket = connection
        self._reader = reader
        self._is_readable = True  # until the agent says what nobody understands
        self._moved: deque[MovedSlots] = deque()
        self._peer_words: deque[OfferedPeer | PeerPoolDropped] = deque()
        self._socket.setblocking(False)
        _open_connections.add(self)

    def fileno(self) -> int:
        """Readable once the agent has gone or says something; -1 after `close()`."""
        return self._socket.fileno()

    def lost(self) -> bool:
        """Read what is there; whether the agent has gone. What cannot be understood is ignored, also all after it.

        Raises `HandoffError` for moved slots that cannot be mapped: the agent would wait for ever for a stream that
        does not know where they are.
        """
        try:
            for _ in range(_MAX_FRAMES_PER_LOOK):
                if not self._is_readable:
                    return not self._socket.recv(4096)
                frame = self._read()
                if frame is None:
                    return self._reader.is_ended
                self._hear(frame)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return False

    def take_moved(self) -> MovedSlots | None:
        """The oldest move of the slots that `lost()` has read, or None."""
        return self._moved.popleft() if self._moved else None

    def take_peer_word(self) -> OfferedPeer | PeerPoolDropped | None:
        """The oldest word about a peer's pool that `lost()` has read, or None."""
        return self._peer_words.popleft() if self._peer_words else None

    def close(self) -> None:
        """End the hand-over: the agent aborts what it does with the pool and unmaps it."""
        self._reader.close()
        for moved in self._moved:
            moved.memory.close()
        self._moved.clear()
        for word in self._peer_words:
            if isinstance(word, OfferedPeer):
                word.memory.close()
        self._peer_words.clear()
        self._socket.close()

    def _read(self) -> bytes | None:
        try:
            return self._reader.read()
        except HandoffError:
            self._is_readable = False
            return None

    def _hear(self, frame: bytes) -> None:
        try:
            word = decode_word(frame)
        except HandoffError:
            self._is_readable = False
            return
        if isinstance(word, MoreEntries):
            self.num_entries_wanted = max(self.num_entries_wanted, word.num_entries)
        elif isinstance(word, LastWord):
            self.num_events = word.num_events
        elif isinstance(word, SlotsMoved):
            self._moved.append(MovedSlots(word.move, attach(word.slots, self._reader.fds, "slots")))
        elif isinstance(word, PeerPool):
            fds = [self._reader.fds.pop(0)] if word.memory.has_fd and self._reader.fds else []
            self._peer_words.append(OfferedPeer(word.index, HeldMemory(word.memory, *fds)))
        elif isinstance(word, PeerPoolDropped):
            self._peer_words.append(word)


_open_connections: weakref.WeakSet[HandoffConnection] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child must not keep the connection open: the agent would not see the worker's death."""
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def hand_over(
    socket_dir: str | os.PathLike[str], memory: HostMemory, layout: PoolLayout, timeout_s: float
) -> HandoffConnection:
    """Give the agent at `socket_dir` a mapping of `memory`, which lies as `layout` says.

    Waits up to `timeout_s` seconds in all, also for an agent that has yet to start. Raises `HandoffError` where the
    agent refuses, `LayoutError` where `layout` goes beyond `memory`, `AgentLostError` where there is no agent or it
    hangs up, `ControlTimeoutError` where it does not answer.
    """
    offer = PoolOffer(num_bytes=memory.num_bytes, layout=layout, pool=describe(memory))
    connection, _ = _hand_over(socket_dir, offer, [memory.fd], timeout_s)
    return connection


def hand_over_device(
    socket_dir: str | os.PathLike[str], memory: MappedPool | DevicePool, layout: PoolLayout, timeout_s: float
) -> tuple[HandoffConnection, Ring]:
    """Give the agent at `socket_dir` a mapping of a pool on a GPU, for a stream of its own.

    The ring, whose timeline streams of this worker may raise, is the caller's. Waits and raises as `hand_over`, and for
    longer where the agent says that it has to: until it has mapped the pool and compiled its kernels. `HandoffError`
    also where the pool cannot be shared, with the remedy.
    """
    shared, fds = share(memory)
    offer = PoolOffer(num_bytes=memory.num_bytes, layout=layout, pool=shared)
    connection, ring = _hand_over(socket_dir, offer, fds, timeout_s)
    assert isinstance(ring, Ring)
    return connection, ring


def share_stream(
    socket_dir: str | os.PathLike[str],
    pool_bytes: int,
    layout: PoolLayout,
    timeout_s: float,
    pool: tuple[SharedMemory, list[int]] | None = None,
) -> tuple[HandoffConnection, StreamMemory]:
    """Tell the agent at `socket_dir` of a pool of `pool_bytes` whose rows a stream of this worker moves.

    `pool`, as `share` returns it, lets decode workers of this host map the pool and pull its rows. What the agent
    shares with the stream is the caller's. Waits and raises as `hand_over`.
    """
    shared, fds = pool if pool is not None else (None, [])
    offer = PoolOffer(num_bytes=pool_bytes, layout=layout, placement="worker", pool=shared, pid=os.getpid())
    connection, memory = _hand_over(socket_dir, offer, fds, timeout_s)
    assert isinstance(memory, StreamMemory)
    return connection, memory


def _hand_over(
    socket_dir: str | os.PathLike[str], offer: PoolOffer, fds: list[int], timeout_s: float
) -> tuple[HandoffConnection, StreamMemory | Ring | None]:
    offer.layout.check_fits(offer.num_bytes)
    deadline_s = time.monotonic() + timeout_s
    connection = _connect(str(socket_path(socket_dir, HANDOFF_SOCKET)), deadline_s)
    reader = FrameReader(connection)
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            stack.callback(reader.close)
            _send(connection, pack(offer), fds, deadline_s)
            answer, prepared_s = _hear_answer(connection, reader, offer, deadline_s)
            memory = _attach_stream(reader, answer.stream, offer)
            stack.pop_all()
    except TimeoutError as error:
        raise ControlTimeoutError(f"hand-off: the agent at {socket_dir} gave no answer in {timeout_s} s") from error
    except OSError as error:
        raise AgentLostError(f"hand-off: the agent at {socket_dir} hung up ({error.strerror})") from error
    return HandoffConnection(connection, reader, answer.pool, prepared_s), memory


def _hear_answer(
    connection: socket.socket, reader: FrameReader, offer: PoolOffer, deadline_s: float
) -> tuple[PoolAccepted, float]:
    """The agent's answer, and for how long it has prepared for it."""
    prepared_s = 0.0
    word = decode_word(_receive(connection, reader, deadline_s))
    if isinstance(word, PoolPreparing):
        began_s = time.monotonic()
        word = decode_word(_receive(connection, reader, began_s + word.timeout_s))
        prepared_s = time.monotonic() - began_s
    if isinstance(word, PoolRefused):
        raise HandoffError(word.detail)
    is_on_gpu = offer.pool is not None and offer.pool.gpu is not None
    if not isinstance(word, PoolAccepted) or (word.stream is None) == (offer.placement == "worker" or is_on_gpu):
        raise HandoffError(f"reply: got {word}, expected an answer to an offer with placement {offer.placement}")
    return word, prepared_s


def _send(connection: socket.socket, offer: bytes, fds: list[int], deadline_s: float) -> None:
    _set_remaining(connection, deadline_s)
    # An agent that refuses may hang up before it has read all; its answer is there to be read all the same.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        num_sent = socket.send_fds(connection, [offer], fds)
        connection.sendall(offer[num_sent:])


def _receive(connection: socket.socket, reader: FrameReader, deadline_s: float) -> bytes:
    """The agent's answer."""
    connection.setblocking(False)
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while (frame := reader.read()) is None or reader.has_lost_fds:
        reader.check_fds()
        if reader.is_ended:
            raise AgentLostError("hand-off: the agent hung up without an answer")
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        poller.poll(remaining_s * 1000)
    return frame


def _attach_stream(reader: FrameReader, shared: SharedStream | None, offer: PoolOffer) -> StreamMemory | Ring | None:
    """Map the ring, and the slots where a stream of this worker moves the rows. Raises `HandoffError`; nothing is
    mapped then."""
    if shared is None:
        return None
    if (shared.slots is None) != (offer.placement == "agent"):
        raise HandoffError(f"reply: got {shared}, expected slots with placement worker alone")
    has_slots = shared.slots is not None and shared.slots.has_fd
    if len(reader.fds) != 1 + has_slots:
        expected = "two: the ring and the slots" if has_slots else "one: the ring"
        raise HandoffError(f"reply: got {len(reader.fds)} descriptors, expected {expected}")
    ring = Ring.attach(reader.fds.pop(0), shared.ring_bytes, shared.num_lanes)
    if shared.slots is None:
        return ring
    try:
        slots = attach(shared.slots, reader.fds, "slots")
    except BaseException:
        ring.close()
        raise
    return StreamMemory(ring, slots)


def _connect(path: str, deadline_s: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, TimeoutError) as error:
            connection.close()
            if time.monotonic() + _CONNECT_RETRY_S >= deadline_s:
                raise AgentLostError(
                    f"no agent listens at {path} ({error.strerror}): start it, or name its socket_dir"
                ) from error
        except OSError as error:
            connection.close()
            raise AgentLostError(f"cannot connect to the agent at {path}: {error.strerror}") from error
        else:
            return connection
        time.sleep(_CONNECT_RETRY_S)


def _set_remaining(connection: socket.socket, deadline_s: float) -> None:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    connection.settimeout(remaining_s)
