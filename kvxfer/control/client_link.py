"""The wires between a worker and its agent, and the core that they feed. Shared by both clients."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.control.channel import REMOTE, WorkerConnection
from kvxfer.control.client_core import ClientCore
from kvxfer.control.handoff import (
    HandoffConnection,
    OfferedPeer,
    StreamMemory,
    hand_over,
    hand_over_device,
    share_stream,
)
from kvxfer.control.handoff_messages import PoolPlacement
from kvxfer.control.messages import PeerPoolMapped, PeerPoolUnmapped, SlotsMapped
from kvxfer.control.shared_memory import PoolMemory, SharedMemory, as_device_pool, share
from kvxfer.control.worker_marks import WorkerMarks
from kvxfer.control.worker_stream import DRAIN_S, WorkerStream
from kvxfer.errors import ContractError, HandoffError, TransportError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool, MappedPool
from kvxfer.streams.host_stream import HostRowStream

if TYPE_CHECKING:
    from kvxfer.streams.row_stream import RowStream

_log = logging.getLogger("kvxfer.worker")

_LAST_EVENTS_S = 1.0
_BACKLOG_S = 0.005
_NAP_S = 0.0002


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A pool that an agent has taken, and the stream that moves its rows, where this worker has one. Owns both.

    `waited_s` is the time that the agent took; a stream, here or there, may take some more to be made. `marks` are
    those of a prefill worker on a GPU without a stream here.
    """

    connection: HandoffConnection
    waited_s: float
    stream: WorkerStream | None = None
    marks: WorkerMarks | None = None

    def close(self) -> None:
        """Let the stream come to rest, then hang up."""
        if self.stream is not None:
            self.stream.close()
        if self.marks is not None:
            self.marks.close()
        self.connection.close()


def hand_over_pool(
    socket_dir: str | os.PathLike[str],
    memory: PoolMemory,
    layout: PoolLayout,
    placement: PoolPlacement | None,
    timeout_s: float,
    *,
    is_prefill: bool,
) -> HandedOver:
    """Hand `memory` over as its placement says; a prefill worker's rows leave its pool, others come. Raises as
    `hand_over`, and `ContractError` for what is no memory or layout and for a placement that the memory cannot have."""
    if not isinstance(getattr(memory, "num_bytes", None), int):
        raise ContractError(f"memory: got {type(memory).__name__}, expected a HostMemory, a MappedPool or a DevicePool")
    if not isinstance(layout, PoolLayout):
        raise ContractError(f"layout: got {type(layout).__name__}, expected a PoolLayout")
    began_s = time.monotonic()
    if isinstance(memory, HostMemory) and placement in ("agent", None):
        return HandedOver(hand_over(socket_dir, memory, layout, timeout_s), time.monotonic() - began_s)
    if not isinstance(memory, HostMemory) and placement == "agent":
        return _hand_over_device(socket_dir, memory, layout, timeout_s, is_prefill=is_prefill)
    if placement not in ("worker", None):
        raise ContractError(f"placement: got {placement!r}, expected 'agent' or 'worker'")
    offered = _offer_to_peers(memory) if is_prefill else None
    connection, shared = share_stream(socket_dir, memory.num_bytes, layout, timeout_s, offered)
    waited_s = time.monotonic() - began_s
    with ExitStack() as stack:
        stack.callback(connection.close)
        stack.callback(shared.close)
        stream = _open_stream(memory, shared, is_prefill=is_prefill)
        stack.callback(stream.close)
        pool = as_device_pool(memory)
        device_index = pool.device_index if isinstance(pool, DevicePool) else None
        worker_stream = WorkerStream(stream, shared, connection.fileno(), device_index=device_index)
        stack.pop_all()
    return HandedOver(connection, waited_s, worker_stream)


def _hand_over_device(
    socket_dir: str | os.PathLike[str],
    memory: MappedPool | DevicePool,
    layout: PoolLayout,
    timeout_s: float,
    *,
    is_prefill: bool,
) -> HandedOver:
    """To a stream of the agent. Of a decode worker nobody asks when its rows are written."""
    began_s = time.monotonic()
    connection, ring = hand_over_device(socket_dir, memory, layout, timeout_s)
    waited_s = time.monotonic() - began_s - connection.prepared_s
    if not is_prefill:
        ring.close()
        return HandedOver(connection, waited_s)
    pool = as_device_pool(memory)
    assert isinstance(pool, DevicePool)
    try:
        return HandedOver(connection, waited_s, marks=WorkerMarks(ring, pool.device_index))
    except BaseException:
        connection.close()
        raise


def _offer_to_peers(memory: PoolMemory) -> tuple[SharedMemory, list[int]] | None:
    """What lets decode workers of this host pull rows; None, and a word in the log, where the memory cannot be shared:
    then rows go through slots."""
    try:
        return share(memory)
    except HandoffError as error:
        _log.info("decode workers of this host cannot pull rows out of the pool: %s", error)
        return None


def _open_stream(memory: PoolMemory, shared: StreamMemory, *, is_prefill: bool) -> RowStream:
    pool, slots = as_device_pool(memory), as_device_pool(shared.slots)
    if isinstance(pool, HostMemory):
        if isinstance(slots, DevicePool):
            raise HandoffError(
                "slots: got those of an agent that has them on a GPU, expected host memory for a pool in host memory: "
                'set slots.kind = "pinned_host" in the configuration of the agent'
            )
        return HostRowStream(shared.ring, pool, slots)
    from kvxfer.streams import cuda_stream  # CUDA and torch: only where a pool lies on a GPU

    max_ctas = cuda_stream.GATHER_CTAS if is_prefill else cuda_stream.SCATTER_CTAS
    if isinstance(slots, DevicePool):
        if slots.device_index != pool.device_index:
            raise HandoffError(
                f"slots: got those of the agent on GPU {slots.device_index}, expected GPU {pool.device_index}, where "
                "the pool lies: set slots.gpu of the agent, or placement of the worker, so that they are one"
            )
        max_ctas = cuda_stream.PULL_CTAS
    return cuda_stream.CudaRowStream(shared.ring, pool, slots, max_ctas=max_ctas, may_bind=is_prefill)


@dataclass(frozen=True, slots=True)
class _Losing:
    """The agent is gone, and what it leaves behind has until then to come to rest, and to come in."""

    detail: str
    rest_until_s: float
    events_until_s: float


class AgentLink:
    """Channel and hand-over connection to one run of an agent, and the stream that it orders. Owns all of them."""

    def __init__(self, socket_dir: str | os.PathLike[str], handed_over: HandedOver) -> None:
        """Connect the channel; take over `handed_over`."""
        self.stream = handed_over.stream
        self._marks = handed_over.marks
        self.core = ClientCore()
        self.handoff = handed_over.connection
        self._losing: _Losing | None = None
        try:
            self.channel = WorkerConnection(socket_dir)
        except BaseException:
            handed_over.close()
            raise

    @property
    def backlog_s(self) -> float | None:
        """After so many seconds `drain()` should be called even if nothing has arrived: the stream may have room for
        entries again, or what a lost agent leaves behind may have come to rest. None where neither is awaited."""
        if self._losing is not None:
            return _BACKLOG_S if self.core.lost is None else None
        return _BACKLOG_S if self.stream is not None and self.stream.has_backlog else None

    def mark(self, stream: object | None) -> int:
        """The value that the timeline has reached once `stream` has done what it was given so far; 0 for a pool without
        a timeline: what is in it is there. Raises `AgentLostError`."""
        self.core.check_alive()
        marks = self.stream or self._marks
        return 0 if marks is None else marks.mark(stream)

    def flush(self) -> None:
        """Enqueue and send what is wanted, as far as there is room; the rest goes another time."""
        if self.stream is not None:
            self.stream.feed()
            for index in self.stream.take_unmapped():
                self.core.tell(PeerPoolUnmapped(index=index))  # a lost agent's stream unmaps nothing here
        outgoing = self.core.outgoing
        while outgoing and self.channel.send(REMOTE, outgoing[0]):
            outgoing.popleft()

    def turn(self, *, has_news: bool) -> None:
        """`drain()`; or, where nothing has arrived and nothing is to be judged, only what costs next to nothing."""
        if has_news or self._losing is not None:
            self.drain()
        else:
            self.flush()

    def drain(self) -> None:
        """Apply all that has arrived, then judge whether the agent still lives, then send what came of it.

        Only the end of the hand-over connection proves that the agent is gone and its pool quiet: an agent that is
        silent, stopped or confused may still touch pages.
        """
        if self._losing is None:
            self._look_after_agent()
        self._hear()
        if self._losing is not None and self.core.lost is None:
            self._settle_loss(self._losing)
        self.flush()

    def _look_after_agent(self) -> None:
        gone = None
        try:
            if self.handoff.lost():
                gone = "it has ended or hung up"
            if self.stream is not None:
                self.stream.want(self.handoff.num_entries_wanted)
            self._map_moved_slots()
            self._map_peers()
        except (HandoffError, TransportError) as error:
            gone = f"its slots have moved to memory that cannot be used here: {error}"
        if gone is None:
            return
        now_s = time.monotonic()
        self._losing = _Losing(gone, now_s + DRAIN_S, now_s + _LAST_EVENTS_S)
        if self.stream is not None:
            self.stream.end()

    def _map_moved_slots(self) -> None:
        while (moved := self.handoff.take_moved()) is not None:
            if self.stream is None or self.core.lost is not None:
                moved.memory.close()
                continue
            try:
                self.stream.replace_slots(moved.memory)
            except TransportError:
                moved.memory.close()
                raise
            self.core.tell(SlotsMapped(move=moved.move))

    def _map_peers(self) -> None:
        while (word := self.handoff.take_peer_word()) is not None:
            if self.stream is None or self.core.lost is not None:
                if isinstance(word, OfferedPeer):
                    word.memory.close()
            elif isinstance(word, OfferedPeer):
                detail = self.stream.map_peer(word.index, word.memory)
                self.core.tell(PeerPoolMapped(index=word.index, detail=detail))
            else:
                self.stream.drop_peer(word.index)

    def _settle_loss(self, losing: _Losing) -> None:
        """The own stream comes to rest before anybody is told that pages are quiet, and events of an agent that ended
        in good order may be a moment behind its end. Until then this returns, after a nap: whoever calls it has other
        things to do, too, and the end of the connection wakes him again at once."""
        now_s = time.monotonic()
        detail = losing.detail
        if self.stream is not None and not self.stream.is_quiet():
            if now_s < losing.rest_until_s:
                time.sleep(_NAP_S)
                return
            detail += "; the own stream that moves rows has not come to rest, so pages may not be quiet"
        num_events = self.handoff.num_events or 0
        if self.core.num_events < num_events and now_s < losing.events_until_s:
            time.sleep(_NAP_S)
            return
        self.core.agent_lost(detail)

    def _hear(self) -> None:
        while (received := self.channel.receive()) is not None:
            self.core.receive(received[1])

    def close(self) -> None:
        """Let the stream come to rest, then close both wires: the agent takes the worker for gone. Calling it again
        does nothing."""
        self.core.close()
        if self.stream is not None:
            self.stream.close()
        if self._marks is not None:
            self._marks.close()
        self.channel.close()
        self.handoff.close()
