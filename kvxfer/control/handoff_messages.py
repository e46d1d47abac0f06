"""What worker and agent say on the hand-off connection, and how it lies there.

On the wire, each way: four bytes of length, big-endian, then that many bytes of msgpack. Descriptors travel with the
first byte of their message.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from typing import Annotated, Literal

import msgspec

from kvxfer.control.message_base import Counter, Id
from kvxfer.control.shared_memory import SharedMemory
from kvxfer.errors import HandoffError
from kvxfer.layout import PoolLayout
from kvxfer.streams.ring import MemoryIndex

HANDOFF_VERSION = 6
MAX_HEADER_BYTES = 1 << 20
LENGTH = struct.Struct("!I")
_MAX_FDS = 4

PoolPlacement = Literal["agent", "worker"]
"""Who moves the rows of a pool: the agent, which maps it, or a stream of the worker, and the agent never sees it."""


class PoolOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Worker to agent: the pool has `num_bytes` and lies as `layout` says.

    `pool` lets others map it, and its descriptor comes along where it has one: the agent itself, with placement
    `agent`; with placement `worker` peers that may pull rows, or, where it is None, nobody. `pid` is that of a worker
    that is to map the agent's slots, as it sees itself, otherwise 0.
    """

    version: Counter = HANDOFF_VERSION
    num_bytes: Counter
    layout: PoolLayout
    placement: PoolPlacement = "agent"
    pool: SharedMemory | None = None
    pid: Counter = 0


class SharedStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the agent shares with a stream of the worker: a ring, see `kvxfer.streams.ring`, and its slots. To a
    worker whose pool on a GPU it has mapped: the ring alone, for its timeline."""

    ring_bytes: Counter
    num_lanes: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    slots: SharedMemory | None = None


class PoolAccepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="accepted"):
    """Agent to worker: taken; `pool` is its name from now on.

    Descriptors of what `stream` tells of come along: the ring, and the slots with placement `worker`.
    """

    pool: Id
    stream: SharedStream | None = None


class PoolPreparing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="preparing"):
    """Agent to worker: the pool is being mapped; the answer comes within `timeout_s`."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class PoolRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="refused"):
    """Agent to worker: nothing was mapped."""

    detail: Annotated[str, msgspec.Meta(max_length=4000)]


class SlotsMoved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="slots_moved"):
    """Agent to worker: the slots lie in the memory whose descriptor comes along. The agent gives no order until
    `SlotsMapped` answers this `move`, on the control channel."""

    move: Counter
    slots: SharedMemory


PeerIndex = Annotated[int, msgspec.Meta(ge=MemoryIndex.FIRST_PEER.value, lt=MemoryIndex.STAGING.value)]


class PeerPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="peer_pool"):
    """Agent to worker: map the pool of a prefill worker of this host, whose descriptor comes along where it has one.
    `PeerPoolMapped` answers, on the control channel; orders name the memory by `index`."""

    index: PeerIndex
    memory: SharedMemory


class PeerPoolDropped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="peer_pool_dropped"):
    """Agent to worker: no order names `index` any more, unmap what it stands for once the stream is at rest; enqueue
    nothing until then. `PeerPoolUnmapped` answers, on the control channel, also where nothing was mapped."""

    index: PeerIndex


class MoreEntries(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="more_entries"):
    """Agent to worker: have so many entries enqueued, counted since the ring was made. It is said before the answer to
    the request that needs them, and is there sooner than what takes the control channel with its threads."""

    num_entries: Counter


class LastWord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="last_word"):
    """Agent to worker, before it hangs up in good order: it has sent so many events on the control channel since the
    worker attached, which travel another way than the end of this connection."""

    num_events: Counter


PeerWord = PeerPool | PeerPoolDropped
AgentWord = PoolPreparing | PoolAccepted | PoolRefused | SlotsMoved | PeerWord | MoreEntries | LastWord
HandoffMessage = PoolOffer | AgentWord

_encoder = msgspec.msgpack.Encoder()
_agent_decoder = msgspec.msgpack.Decoder(AgentWord)


def pack(message: HandoffMessage) -> bytes:
    """`message` as it goes over the socket, length first."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_word(frame: bytes) -> AgentWord:
    """What the agent says in a frame. Raises `HandoffError`."""
    try:
        return _agent_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HandoffError(f"reply: {error}") from error


class FrameReader:
    """Frames and the descriptors that came with them, out of one unix socket.

    Descriptors wait in `fds`, in the order of their messages, until somebody takes them; `close()` closes the rest.
    """

    def __init__(self, connection: socket.socket) -> None:
        """The socket stays the caller's."""
        self.fds: list[int] = []
        self.is_ended = False
        """Whether the other end has hung up."""
        self.has_lost_fds = False
        """Whether more descriptors came than fit: at most 4 at once, and what this process may open. The frames of
        those that are missing come all the same."""
        self._socket = connection
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._data)

    def read(self) -> bytes | None:
        """The next frame without its length, or None where it is not all here, or the other end has hung up.

        Raises `HandoffError` for what can be no frame, `OSError` as the socket does.
        """
        while num_missing := self._num_missing():
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    num_missing, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return None
            self.fds += take_fds(ancillary)
            self.has_lost_fds |= bool(flags & socket.MSG_CTRUNC)
            if not data:
                self.is_ended = True
                return None
            self._data += data
        frame = bytes(self._data[LENGTH.size :])
        self._data.clear()
        return frame

    def check_fds(self) -> None:
        """Raise `HandoffError` where a descriptor is missing."""
        if self.has_lost_fds:
            raise HandoffError(f"descriptors: got more than {_MAX_FDS} at once, or than this process may open")

    def take_fds(self) -> list[int]:
        """All descriptors that wait; they are the caller's."""
        taken, self.fds = self.fds, []
        return taken

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def _num_missing(self) -> int:
        """Bytes that are still to come, as far as it is known: the length first, then the header."""
        if len(self._data) < LENGTH.size:
            return LENGTH.size - len(self._data)
        (header_bytes,) = LENGTH.unpack_from(self._data)
        if not 1 <= header_bytes <= MAX_HEADER_BYTES:
            raise HandoffError(f"header: got a length of {header_bytes}, expected 1 to {MAX_HEADER_BYTES} bytes")
        return LENGTH.size + int(header_bytes) - len(self._data)


def take_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in what `recvmsg` returned; they are the caller's."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
