"""What both agents share: the loop, the worker's connection and pool, the slots and their engine.

One thread runs the loop. It drains every queue first, then judges the clock, then performs what the core asked for;
it waits for nobody.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from kvxfer.control.channel import Channel, HasFileno, Selector, WorkerListener
from kvxfer.control.codec import decode, encode
from kvxfer.control.handoff_listener import HandoffListener, LostPool, ReceivedPool, RefusedHandoff
from kvxfer.control.ids import new_id
from kvxfer.control.messages import AttachWorker, Message, Refused, TransferEvent, WorkerReply
from kvxfer.errors import KvxferError, RefusedError
from kvxfer.layout import PoolLayout
from kvxfer.operations import RowExecutor
from kvxfer.ops.config import OpsConfig, SlotConfig, TransportConfig
from kvxfer.ops.health import Ops, Pulse
from kvxfer.row_mover import HostExecutor, RowMover
from kvxfer.rows_host import ByteArray
from kvxfer.slot_memory import SlotMemory
from kvxfer.transports.registry import create_transport

TICK_S = 0.1
_LAST_WORDS_S = 0.1
MAX_MESSAGES_PER_TURN = 512


class Agent(Protocol):
    """What a side adds to the loop."""

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

    def begin_drain(self, now: float) -> None:
        """Take on nothing new from now on; what is open may go on."""
        ...

    def is_drained(self) -> bool:
        """Whether nothing is open any more."""
        ...

    def tick(self, now: float) -> None: ...

    def perform(self, now: float) -> None:
        """Perform every action of the core, and those that follow from them."""
        ...


class Sidecar:
    """The parts of an agent. `run()` serves until `stop()` and what is open then has ended, for at most `drain_s`
    seconds; `close()` gives everything back."""

    def __init__(
        self,
        agent: Agent,
        *,
        role: str,
        socket_dir: str,
        host: str,
        transport: TransportConfig,
        slots: SlotConfig,
        ops: OpsConfig,
        num_threads: int,
        drain_s: float,
        is_target: bool = True,
    ) -> None:
        self.incarnation = new_id()
        self.log = logging.getLogger(f"kvxfer.{role}")
        self.pool: ReceivedPool | None = None
        self._slot_config = slots
        self._agent = agent
        self._worker: bytes | None = None
        self._next_pool: ReceivedPool | None = None
        self._lost_pool: ReceivedPool | None = None
        self._rows: RowExecutor | None = None  # of the pool, also of a lost one that is still in use
        self._waiting_worker: tuple[bytes, AttachWorker, int] | None = None  # of the next pool
        self._events: deque[TransferEvent] = deque()  # for the worker: at most two a transfer that it opened
        self.pulse = Pulse()
        self._num_stops = 0
        self._drain_s = drain_s
        self._drain_until: float | None = None  # set while draining
        self._has_backlog = False  # a channel held more than one turn takes
        self._handlers: dict[int, Callable[[float], None]] = {}
        self._selector = Selector()
        with ExitStack() as stack:
            self._workers = WorkerListener(socket_dir)
            stack.callback(self._workers.close)
            self._handoffs = HandoffListener(socket_dir)
            stack.callback(self._handoffs.close)
            self.slots = SlotMemory(slots)
            stack.callback(lambda: self.slots.memory.close())
            options = dict(transport.options)
            if transport.interface:
                options["interface"] = transport.interface
            self.transport = create_transport(
                transport.name, incarnation=self.incarnation, host=host, options=options, is_target=is_target
            )
            stack.callback(self.transport.close)
            self.region = self.transport.register(self.slots.region)
            self.mover = RowMover(num_threads, f"kvxfer-{role}")
            stack.callback(self.mover.close)
            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, self._stop_fd)
            self.ops = Ops(ops, self.pulse)
            stack.callback(self.ops.close)
            self._stack = stack.pop_all()
        self.watch(self._workers, self._receive_from_workers)
        self.watch(self._handoffs, self._poll_handoffs)
        self._selector.add(self._stop_fd)

    def renew_slots(self) -> None:
        """Move the slots to other memory, where nothing that a peer still does to the old ones can reach them.

        Raises `TransportError` or `OSError`, and changes nothing, where there is no more memory to be had.
        """
        fresh = SlotMemory(self._slot_config)
        try:
            region = self.transport.register(fresh.region)
        except BaseException:
            fresh.memory.close()
            raise
        old_slots, old_region = self.slots, self.region
        self.slots, self.region = fresh, region
        self.transport.deregister(old_region)
        old_slots.memory.abandon()
        self.log.warning("moved %d slots to other memory: late writes may still reach the old", fresh.num_slots)

    # ---- the loop ----

    def watch(self, item: Channel | HasFileno, handler: Callable[[float], None]) -> None:
        """Call `handler(now)` whenever `item` is readable."""
        self._handlers[id(item)] = handler
        self._selector.add(item)

    def unwatch(self, item: Channel | HasFileno) -> None:
        """Look at `item` no longer; call it before `item` is closed."""
        if self._handlers.pop(id(item), None) is not None:
            self._selector.remove(item)

    def run(self) -> None:
        """Serve until `stop()` is called, from a signal handler or another thread, and what is open has ended."""
        tick_at = 0.0
        while not self._may_end(time.monotonic()):
            ready = self._selector.wait(TICK_S)
            self.pulse.turned_at = now = time.monotonic()
            self._has_backlog = False
            for item in ready:
                handler = self._handlers.get(id(item))
                if handler is not None:
                    handler(now)
            # What has arrived comes before the clock; a flood that does not end delays it by one tick.
            if now >= tick_at + (TICK_S if self._has_backlog else 0.0):
                tick_at = now + TICK_S
                self._poll_handoffs(now)
                self._agent.tick(now)
            self._agent.perform(now)
            self._send_events()
            self._swap_pools()

    def stop(self) -> None:
        """Let `run()` end once it has drained; called again, at once."""
        self._num_stops += 1
        self.pulse.is_draining = True
        os.eventfd_write(self._stop_fd, 1)

    def _may_end(self, now: float) -> bool:
        """Whether `run()` was told to stop and has nothing left to wait for."""
        if self._num_stops == 0:
            return False
        if self._drain_until is None:
            self._selector.remove(self._stop_fd)  # it stays readable; `stop()` again is seen by the next tick
            self._drain_until = now + self._drain_s
            self.log.info("draining for at most %.1f s", self._drain_s)
            self._agent.begin_drain(now)
            self._agent.perform(now)
            self._send_events()
        if self._num_stops > 1 or now >= self._drain_until:
            return True
        return self._agent.is_drained() and not self._events

    def close(self) -> None:
        """Give back sockets, engine, threads and memory, in this order. Calling it again does nothing."""
        self._handlers.clear()
        if self._worker is not None:
            # ZMQ sends in a thread of its own: what was said last leaves before the hang-up.
            select.select([], [], [], _LAST_WORDS_S)
            self._worker = None
        self._stack.close()
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        for pool in (self.pool, self._next_pool, self._lost_pool):
            if pool is not None:
                pool.close()

    def drain(self, channel: Channel, handle: Callable[[bytes, Message, int], None]) -> None:
        """Handle what `channel` holds, up to a bound, each message for itself: a bad one is logged and dropped."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            received = channel.receive()
            if received is None:
                return
            sender, frame = received
            try:
                message, request_id = decode(frame)
                handle(sender, message, request_id)
            except KvxferError as error:
                self.log.warning("dropped a message from %s: %s", sender.hex()[:32] or "the peer", error)
        self._has_backlog = True

    # ---- the worker ----

    def notify(self, event: TransferEvent) -> None:
        """Send an event to the worker, where there is one; a worker whose queue is full gets it later."""
        if self._worker is not None:
            self._events.append(event)
            self._send_events()

    def _send_events(self) -> None:
        while self._events and self._worker is not None:
            if not self._workers.send(self._worker, encode(self._events[0])):
                return
            self._events.popleft()

    def _receive_from_workers(self, now: float) -> None:
        def handle(sender: bytes, message: Message, request_id: int) -> None:
            if isinstance(message, AttachWorker) and self._next_pool and self._next_pool.pool == message.pool:
                self._waiting_worker = (sender, message, request_id)
            else:
                self._answer(sender, message, request_id, now)

        self.drain(self._workers, handle)

    def _answer(self, sender: bytes, message: Message, request_id: int, now: float) -> None:
        try:
            reply = self._serve(sender, message, now)
        except RefusedError as error:
            reply = Refused(reason=error.reason, detail=error.detail[:2000], field=error.field[:2000])
        except KvxferError as error:
            reply = Refused(detail=str(error)[:2000])
        self._workers.send(sender, encode(reply, request_id))

    def _serve(self, sender: bytes, message: Message, now: float) -> WorkerReply:
        if isinstance(message, AttachWorker):
            if self.pool is None or message.pool != self.pool.pool:
                raise RefusedError("attach: this agent serves another worker's pool; one agent serves one worker")
            reply = self._agent.worker_attached(self.pool.layout, now)
            self._worker = sender
            return reply
        if sender != self._worker:
            raise RefusedError("got a request before the worker has handed over its pool and attached")
        return self._agent.worker_request(message, now)

    def _poll_handoffs(self, now: float) -> None:
        events = self._handoffs.poll(now)
        # A worker that was restarted hands over before its old connection was looked at: that one first.
        for event in sorted(events, key=lambda event: not isinstance(event, LostPool)):
            match event:
                case ReceivedPool():
                    self._take_pool(event)
                case LostPool():
                    self._lose_pool(event.pool, now)
                case RefusedHandoff():
                    self.log.warning("refused a hand-off: %s", event.detail)

    def _take_pool(self, received: ReceivedPool) -> None:
        if self.pool is None and self._lost_pool is None:
            self.pool = received
            self._rows = HostExecutor(self.mover, self.pool_array(), lambda slot: self.slots.view(slot))
            num_groups = len(received.layout.groups)
            self.log.info("pool %s: %d bytes, %d groups", received.pool, received.num_bytes, num_groups)
        elif self.pool is None and self._next_pool is None:
            self._next_pool = received  # waits until the last operation on the lost one has ended
        else:
            # Its worker hears of it when it attaches.
            self.log.warning("refused a second pool: this agent serves one worker")
            received.close()

    def _lose_pool(self, pool: str, now: float) -> None:
        if self._next_pool is not None and self._next_pool.pool == pool:
            self._next_pool.close()
            self._next_pool = None
        if self.pool is None or self.pool.pool != pool:
            return
        self.log.info("pool %s: its worker is gone", pool)
        self._worker = None
        self._events.clear()
        self._lost_pool, self.pool = self.pool, None
        self._agent.worker_lost(now)
        self.rows.stop("the worker is gone")

    def _swap_pools(self) -> None:
        """Unmap a lost pool once nothing touches it, then take the one that waits."""
        if self._lost_pool is None or not self._agent.is_pool_quiet():
            return
        self.rows.close()
        self._rows = None
        self._lost_pool.close()
        self._lost_pool = None
        if self._next_pool is not None:
            received, self._next_pool = self._next_pool, None
            self._take_pool(received)
        if self._waiting_worker is not None:
            (sender, message, request_id), self._waiting_worker = self._waiting_worker, None
            self._answer(sender, message, request_id, time.monotonic())

    @property
    def rows(self) -> RowExecutor:
        """What moves rows of the worker's pool, also of one that was lost and is still in use. There is one whenever
        a core asks for moves."""
        assert self._rows is not None
        return self._rows

    def pool_array(self) -> ByteArray:
        """`[pool_bytes]` uint8 of the worker's pool, also of one that was lost and is still in use; empty where none is
        mapped."""
        pool = self.pool or self._lost_pool
        return np.empty(0, dtype=np.uint8) if pool is None or pool.memory is None else pool.memory.array
