"""What both agents share: the loop, the worker's connection and pool, the slots and their engine.

One thread runs the loop. It drains every queue first, then judges the clock, then performs what the core asked for;
it waits for nobody.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from kvxfer.control.channel import Channel, HasFileno, Selector
from kvxfer.control.codec import split, unpack
from kvxfer.control.handoff_listener import ReceivedPool
from kvxfer.control.ids import new_id
from kvxfer.control.messages import Message, PeerPoolMapped, PeerPoolUnmapped, TransferEvent
from kvxfer.errors import KvxferError, ProtocolError, TransportError
from kvxfer.operations import Moved, RowExecutor
from kvxfer.ops.config import OpsConfig, SlotConfig, TransportConfig
from kvxfer.ops.health import Ops, Pulse
from kvxfer.ops.tracing import Trace
from kvxfer.peer_pools import PeerPools
from kvxfer.row_mover import RowMover
from kvxfer.row_opening import open_rows
from kvxfer.slot_memory import SlotMemory
from kvxfer.transports.base import Transport
from kvxfer.transports.registry import create_transport
from kvxfer.worker_desk import WorkerAgent, WorkerDesk

TICK_S = 0.1
MAX_MESSAGES_PER_TURN = 512
_NIXL_COST = (
    "; between processes of one host NIXL 1.5 moves such memory at 0.4 GB/s: let agent and worker share a PID "
    'namespace (shareProcessNamespace: true), or set slots.kind = "pinned_host"'
)


class Agent(WorkerAgent, Protocol):
    """What a side adds to the loop."""

    def begin_drain(self, now: float) -> None:
        """Take on nothing new from now on; what is open may go on."""
        ...

    def is_drained(self) -> bool:
        """Whether nothing is open any more."""
        ...

    def poll(self, now: float) -> None:
        """See which moves and writes have ended, whoever woke the loop."""
        ...

    def tick(self, now: float) -> None: ...


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
        checks_segments: bool = False,
    ) -> None:
        self.incarnation = new_id()
        self.log = logging.getLogger(f"kvxfer.{role}")
        self._slot_config = slots
        self._left: list[SlotMemory] = []  # by slots that have moved, while the engine may still reach it
        self._agent = agent
        self.pulse = Pulse()
        self._num_stops = 0
        self._drain_s = drain_s
        self._drain_until: float | None = None  # set while draining
        self._has_backlog = False  # a channel held more than one turn takes
        self.held_s = 0.0
        """How long this turn and those of the last second came late: the process was stopped, or one took long."""
        self._held_at = 0.0
        self._handlers: dict[int, Callable[[float], None]] = {}
        self._selector = Selector()
        with ExitStack() as stack:
            self.peers: PeerPools | None = None
            """Pools that rows of the worker's pool can be pulled from; as long as there is an executor of its rows."""
            self.desk = WorkerDesk(
                agent,
                socket_dir,
                self.log,
                slots=lambda: self.slots,
                open_rows=self._open_rows,
                has_gpu_slots=slots.kind == "device",
                checks_segments=checks_segments,
                call=lambda work: self.mover.call(work),
                hear_of_peer=self._hear_of_peer,
            )
            stack.callback(self.desk.close)
            stack.callback(self._close_peers)
            self.slots = SlotMemory.at_start(slots)
            stack.callback(lambda: self.slots.close())
            stack.callback(self._close_left)
            self.transport = self._open_transport(transport, host, is_target=is_target)
            stack.callback(self.transport.close)
            self.region = self.transport.register(self.slots.region)
            self.mover = RowMover(num_threads, f"kvxfer-{role}")
            stack.callback(self.mover.close)
            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(self._close_stop)
            self.ops = Ops(ops, self.pulse)
            stack.callback(self.ops.close)
            self.trace = Trace(ops.trace_file)
            stack.callback(self.trace.close)
            self._stack = stack.pop_all()
        self.watch(self.desk.channel, lambda now: self.desk.receive(self.drain, now))
        self.watch(self.desk.handoffs, self.desk.poll_handoffs)
        self._selector.add(self._stop_fd)
        self.wake_on(self.mover)

    def _open_transport(self, transport: TransportConfig, host: str, *, is_target: bool) -> Transport:
        options = dict(transport.options)
        if transport.interface:
            options["interface"] = transport.interface
        self.log.info("transport %s, slots: %s", transport.name, self.slots)
        return create_transport(
            transport.name,
            incarnation=self.incarnation,
            host=host,
            options=options,
            is_target=is_target,
            gpu_index=self.slots.region.gpu_index,
        )

    def renew_slots(self, *, has_fd: bool = False) -> None:
        """Move the slots to other memory, where nothing that somebody still does to the old ones can reach them; with
        `has_fd` to memory with a descriptor, as they keep it from then on.

        Raises `TransportError` or `OSError`, and changes nothing, where there is no more memory to be had. An engine
        that does not let go of old host memory keeps addresses where nothing lies any more; old memory of a GPU waits
        for `rotate`, which must follow.
        """
        if self._left:
            self.rotate()  # never more than one memory beside the slots
        fresh = SlotMemory(self._slot_config, self.slots.move + 1, has_fd=has_fd or self.slots.has_fd)
        try:
            region = self.transport.register(fresh.region)
        except BaseException:
            fresh.close()
            raise
        old_slots, old_region = self.slots, self.region
        self.slots, self.region = fresh, region
        try:
            self.transport.deregister(old_region)
        except TransportError:
            self.log.exception("the slots' old memory stays registered")
        self.desk.tell_of_move()  # first: a stream of the agent's own must not use memory that is given back
        if not old_slots.leave():
            self._left.append(old_slots)
        why = "late writes may still reach the old"
        if has_fd:
            why = f"a worker has the process id of this agent{_NIXL_COST if self.transport.name == 'nixl' else ''}"
        self.log.warning("moved slots to other memory, %s: %s", fresh, why)

    @property
    def must_rotate(self) -> bool:
        """Whether the slots have left memory that only `rotate` gives back."""
        return bool(self._left)

    def rotate(self) -> None:
        """Replace the engine; then nothing reaches memory that the slots have left. Raises `TransportError`."""
        self.transport.rotate()
        self._close_left()

    def _close_left(self) -> None:
        while self._left:
            self._left.pop().close()

    # ---- the loop ----

    def watch(self, item: Channel | HasFileno, handler: Callable[[float], None]) -> None:
        """Call `handler(now)` whenever `item` is readable."""
        self._handlers[id(item)] = handler
        self._selector.add(item)

    def wake_on(self, item: HasFileno) -> None:
        """Begin a turn whenever `item` is readable, which `Agent.poll` looks at anyway."""
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
            now = time.monotonic()
            self._note_turn(now)
            self._has_backlog = False
            for item in ready:
                handler = self._handlers.get(id(item))
                if handler is not None:
                    handler(now)
            self._agent.poll(now)
            # What has arrived comes before the clock; a flood that does not end delays it by one tick.
            if now >= tick_at + (TICK_S if self._has_backlog else 0.0):
                tick_at = now + TICK_S
                self.desk.poll_handoffs(now)
                self._agent.tick(now)
            self._agent.perform(now)
            if self.peers is not None:
                self.peers.advance()
            self.desk.send()
            self.desk.swap_pools()

    def _note_turn(self, now: float) -> None:
        """A turn begins; remember how long the longest of the last second's was away."""
        late_s = 0.0 if self.pulse.turned_at is None else now - self.pulse.turned_at
        if late_s >= self.held_s or now > self._held_at + 1.0:
            self.held_s, self._held_at = late_s, now
        self.pulse.turned_at = now

    def stop(self) -> None:
        """Let `run()` end once it has drained; called again, at once. After that it does nothing: a signal may come
        while all is being closed."""
        self._num_stops += 1
        self.pulse.is_draining = True
        if self._stop_fd >= 0:
            os.eventfd_write(self._stop_fd, 1)

    def _close_stop(self) -> None:
        descriptor, self._stop_fd = self._stop_fd, -1
        os.close(descriptor)

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
            self.desk.send()
        if self._num_stops > 1 or now >= self._drain_until:
            return True
        return self._agent.is_drained() and not self.desk.has_news

    def close(self) -> None:
        """Give back sockets, engine, threads and memory, in this order. Calling it again does nothing."""
        self._handlers.clear()
        self.desk.seat.end_rows()  # no stream of the worker is left waiting for the rest
        self._stack.close()

    def drain(self, channel: Channel, handle: Callable[[bytes, Message, int], None]) -> None:
        """Handle what `channel` holds, up to a bound, each message for itself: a bad one is logged and dropped."""
        channel.look()
        num_messages = 0
        while num_messages < MAX_MESSAGES_PER_TURN:
            received = channel.next_frame()
            if received is None:
                return
            sender, frame = received
            try:
                envelopes = split(frame)
            except ProtocolError as error:
                self._say_dropped(sender, error)
                num_messages += 1
                continue
            num_messages += len(envelopes)
            for envelope in envelopes:
                if channel.is_closed:  # by what came before
                    return
                try:
                    message, request_id = unpack(envelope)
                    handle(sender, message, request_id)
                except KvxferError as error:
                    self._say_dropped(sender, error)
        self._has_backlog = True

    def _say_dropped(self, sender: bytes, error: KvxferError) -> None:
        self.log.warning("dropped a message from %s: %s", sender.hex()[:32] or "the peer", error)

    # ---- the worker ----

    def notify(self, event: TransferEvent) -> None:
        """`WorkerDesk.notify`."""
        self.desk.notify(event)

    @property
    def pool(self) -> ReceivedPool | None:
        """The pool of the worker, while it is there."""
        return self.desk.seat.pool

    @property
    def rows(self) -> RowExecutor:
        """`PoolSeat.rows`."""
        return self.desk.seat.rows

    def poll_moves(self) -> list[Moved]:
        """Moves of the worker's rows that have ended since the last call."""
        return self.desk.seat.look() + self.mover.poll()

    def _open_rows(self, pool: ReceivedPool) -> RowExecutor:
        self._close_peers()  # of the worker before
        rows, self.peers = open_rows(pool, self.mover, lambda: self.slots, self.desk)
        return rows

    def _hear_of_peer(self, word: PeerPoolMapped | PeerPoolUnmapped) -> None:
        if self.peers is not None:
            self.peers.hear(word)

    def _close_peers(self) -> None:
        if self.peers is not None:
            self.peers.close()
            self.peers = None
