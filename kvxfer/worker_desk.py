"""Where an agent meets its one worker: the hand-over of its pool, its requests and events, the orders for its stream.

Runs on the agent's loop and waits for nobody.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvxfer.control.channel import Channel, WorkerListener
from kvxfer.control.codec import encode
from kvxfer.control.device_handoff import CallInThread
from kvxfer.control.handoff_listener import HandoffListener, LostPool, ReceivedPool, RefusedHandoff
from kvxfer.control.handoff_messages import MoreEntries, PeerWord
from kvxfer.control.messages import (
    AttachWorker,
    Message,
    Ok,
    PeerPoolMapped,
    PeerPoolUnmapped,
    Refused,
    SlotsMapped,
    TransferEvent,
    WorkerReply,
)
from kvxfer.control.shared_memory import HeldMemory, as_device_pool
from kvxfer.errors import KvxferError, RefusedError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.operations import RowExecutor
from kvxfer.pool_seat import PoolSeat, make_ring
from kvxfer.slot_memory import SlotMemory
from kvxfer.streams.device import MappedPool
from kvxfer.streams.ring import Ring

Drain = Callable[[Channel, Callable[[bytes, Message, int], None]], None]


class WorkerAgent(Protocol):
    """What a side does for its worker."""

    def worker_attached(self, layout: PoolLayout, now: float) -> WorkerReply:
        """The worker's connection and pool are known: the answer to it."""
        ...

    def worker_lost(self, now: float) -> None: ...

    def worker_request(self, message: Message, now: float) -> WorkerReply:
        """Serve a request. Raises `KvxferError`; nothing has changed then."""
        ...

    def is_pool_quiet(self) -> bool:
        """Whether no operation touches the worker's pool."""
        ...

    def share_slots_by_fd(self, now: float) -> None:
        """Move the slots to memory of their GPU that has a descriptor; where that fails, say so in the log. There is no
        worker, and nothing uses the slots but writes with an unknown end."""
        ...

    def perform(self, now: float) -> None:
        """Perform every action of the core, and those that follow from them."""
        ...


class WorkerDesk:
    """Owns the sockets to workers and their pools. `close()` hangs up and gives all back."""

    def __init__(
        self,
        agent: WorkerAgent,
        socket_dir: str,
        log: logging.Logger,
        *,
        slots: Callable[[], SlotMemory],
        open_rows: Callable[[ReceivedPool], RowExecutor],
        has_gpu_slots: bool,
        call: CallInThread,
        hear_of_peer: Callable[[PeerPoolMapped | PeerPoolUnmapped], None],
        checks_segments: bool = False,
    ) -> None:
        """Listen. `slots` tells where the agent's slots are now, on a GPU with `has_gpu_slots`; `open_rows` makes the
        executor of a pool; `call` runs something in a thread; `hear_of_peer` gets what the worker says of peers' pools.
        With `checks_segments` streams are to check segments before they scatter them. Raises `ConfigError`."""
        self._hear_of_peer = hear_of_peer
        self.seat = PoolSeat(open_rows, log)
        self.channel = WorkerListener(socket_dir)
        try:
            self.handoffs = HandoffListener(socket_dir, self._share_stream, has_gpu_slots=has_gpu_slots, call=call)
        except BaseException:
            self.channel.close()
            raise
        self._agent = agent
        self._log = log
        self._slots = slots
        self._checks_segments = checks_segments
        self._worker: bytes | None = None
        self._waiting_worker: tuple[bytes, AttachWorker, int] | None = None  # of the next pool
        self._num_events = 0  # that this worker was sent
        self._events: deque[TransferEvent] = deque()  # for the worker: at most two a transfer that it opened
        self._num_entries: int | None = None  # that the worker is to be asked for
        self._peer_words: deque[tuple[PeerWord, HeldMemory | None]] = deque()  # for the worker
        self._move_told = 0  # the last move of the slots that the worker has heard of

    @property
    def has_news(self) -> bool:
        """Whether something for the worker has not been sent yet."""
        return bool(self._events)

    def close(self) -> None:
        """Leave no stream of the worker waiting, hang up, give the pools back. Nothing touches them any more."""
        self.seat.end_rows()
        if self._worker is not None and self.seat.pool is not None:
            self.handoffs.say_last(self.seat.pool.pool, self._num_events)
        self._worker = None
        self._drop_peer_words()
        self.handoffs.close()
        self.channel.close()
        self.seat.close()

    # ---- requests and events ----

    def notify(self, event: TransferEvent) -> None:
        """Send an event to the worker, where there is one; a worker whose queue is full gets it later."""
        if self._worker is not None:
            self._events.append(event)
            self.send()

    def want_entries(self, num_entries: int) -> None:
        """Ask the worker to have so many entries enqueued since its ring was made."""
        self._num_entries = num_entries
        self.send()

    def tell_of_peer(self, word: PeerWord, memory: HeldMemory | None) -> None:
        """Say `word` to the stream's owner; `memory`, which goes along, is this object's from now on."""
        self._peer_words.append((word, memory))
        self.send()

    def send(self) -> None:
        """Send what waits for the worker, as far as it takes it."""
        self._send_words()
        while self._events and self._worker is not None:
            if not self.channel.send(self._worker, encode(self._events[0])):
                return
            self._events.popleft()
            self._num_events += 1

    def _send_words(self) -> None:
        pool = self.seat.pool
        if pool is None:
            return
        if self._num_entries is not None:
            # Before the answer to the request that needs them: the worker enqueues them within that call.
            if not self.handoffs.tell(pool.pool, MoreEntries(num_entries=self._num_entries), []):
                return
            self._num_entries = None
        while self._peer_words:
            word, memory = self._peer_words[0]
            if not self.handoffs.tell(pool.pool, word, [] if memory is None else memory.fds()):
                return
            self._peer_words.popleft()
            if memory is not None:
                memory.close()

    def _drop_peer_words(self) -> None:
        for _, memory in self._peer_words:
            if memory is not None:
                memory.close()
        self._peer_words.clear()

    def receive(self, drain: Drain, now: float) -> None:
        """Serve the requests that have arrived."""

        def handle(sender: bytes, message: Message, request_id: int) -> None:
            waiting = self.seat.waiting
            if isinstance(message, AttachWorker) and waiting is not None and waiting.pool == message.pool:
                self._waiting_worker = (sender, message, request_id)
            else:
                self._answer(sender, message, request_id, now)
                # What it leads to begins before the next request is looked at, and is told of after the answer.
                self._agent.perform(now)

        drain(self.channel, handle)

    def _answer(self, sender: bytes, message: Message, request_id: int, now: float) -> None:
        try:
            reply = self._serve(sender, message, now)
        except RefusedError as error:
            reply = Refused(reason=error.reason, detail=error.detail[:2000], field=error.field[:2000])
        except KvxferError as error:
            reply = Refused(detail=str(error)[:2000])
        self.channel.send(sender, encode(reply, request_id))

    def _serve(self, sender: bytes, message: Message, now: float) -> WorkerReply:
        if isinstance(message, AttachWorker):
            pool, unusable = self.seat.pool, self.seat.unusable
            if unusable is not None and unusable[0] == message.pool:
                raise RefusedError(f"attach: nothing can move the rows of this pool: {unusable[1]}")
            if pool is None or message.pool != pool.pool:
                raise RefusedError("attach: this agent serves another worker's pool; one agent serves one worker")
            reply = self._agent.worker_attached(pool.layout, now)
            if sender != self._worker:
                self._worker, self._num_events = sender, 0
            self._move_told = pool.move
            self.tell_of_move()
            return reply
        if sender != self._worker:
            raise RefusedError("got a request before the worker has handed over its pool and attached")
        if isinstance(message, SlotsMapped):
            if message.move == self._slots().move:
                self.seat.rows.hold(False)
            return Ok()
        if isinstance(message, PeerPoolMapped | PeerPoolUnmapped):
            self._hear_of_peer(message)
            return Ok()
        return self._agent.worker_request(message, now)

    # ---- pools ----

    def poll_handoffs(self, now: float) -> None:
        """Take pools that were handed over; see who is gone."""
        events = self.handoffs.poll(now)
        # A worker that was restarted hands over before its old connection was looked at: that one first.
        for event in sorted(events, key=lambda event: not isinstance(event, LostPool)):
            match event:
                case ReceivedPool():
                    self.seat.take(event)
                case LostPool():
                    self._lose_pool(event.pool, now)
                case RefusedHandoff():
                    self._log.warning("refused a hand-off: %s", event.detail)

    def _lose_pool(self, pool: str, now: float) -> None:
        # What the worker was granted in this very turn is done while its pool is known; then peers hear of its end.
        self._agent.perform(now)
        if self.seat.lose(pool):
            self._worker = None
            self._events.clear()
            self._num_entries = None
            self._drop_peer_words()
            self._agent.worker_lost(now)
            self.seat.rows.stop("the worker is gone")

    def swap_pools(self) -> None:
        """Unmap a lost pool once nothing touches it, then take the one that waits."""
        if not self.seat.is_leaving or not self._agent.is_pool_quiet():
            return
        self.seat.swap()
        if self._waiting_worker is not None:
            (sender, message, request_id), self._waiting_worker = self._waiting_worker, None
            self._answer(sender, message, request_id, time.monotonic())

    # ---- slots, as a stream of the worker sees them ----

    def _share_stream(self, layout: PoolLayout, pid: int) -> tuple[Ring, HostMemory | MappedPool, int]:
        if not self._slots().can_be_mapped_by(pid) and self.seat.is_empty:
            self._agent.share_slots_by_fd(time.monotonic())
        # Otherwise, or where that failed, the worker is told by what maps them, with the remedy.
        slots = self._slots()
        ring = make_ring(layout, slots.slot_bytes, slots.num_slots, checks_segments=self._checks_segments)
        return ring, slots.memory, slots.move

    def tell_of_move(self) -> None:
        """A worker whose stream knows other slots than the present ones is told, and gets no order until it has mapped
        these. A stream of the agent's own has them at once."""
        pool, slots = self.seat.pool, self._slots()
        if (own_rows := self.seat.own_rows) is not None:
            own_rows.slots_moved(as_device_pool(slots.memory))
            return
        if self._worker is None or pool is None or pool.ring is None or self._move_told == slots.move:
            return
        self._move_told = slots.move
        self.seat.rows.hold(True)
        self.handoffs.move_slots(pool.pool, slots.move, slots.memory)
