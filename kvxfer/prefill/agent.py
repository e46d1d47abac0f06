"""The prefill agent: performs what its core asks for, beside a prefill worker."""

from __future__ import annotations

import time

import numpy as np

from kvxfer.control.channel import PeerListener
from kvxfer.control.ids import new_id
from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    Message,
    NewTicket,
    Ok,
    Source,
    Submit,
    Ticket,
    TicketMade,
    WorkerReply,
)
from kvxfer.errors import RefusedError, TransportError
from kvxfer.layout import PoolLayout
from kvxfer.ops.config import PrefillConfig
from kvxfer.prefill.actions import Gather, Notify, SendToPeer, Write
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.leg import Mode
from kvxfer.prefill.links import PeerLinks
from kvxfer.rows_host import gather_segment
from kvxfer.sidecar import Sidecar
from kvxfer.slots import SENDER_MOVES, SlotTable
from kvxfer.transfer import Reason
from kvxfer.transports.base import Outcome, Region, RegionDescriptor, WriteBatch

_ROTATE_EVERY_S = 5.0


class PrefillAgent:
    """One prefill agent. `endpoint` is where decode agents reach it, `incarnation` the id of this run."""

    def __init__(self, config: PrefillConfig) -> None:
        """Listen, make the slots, start the engine. Raises `ConfigError`, `EngineMissingError`, `TransportError`."""
        self._writes: dict[int, Write] = {}
        self._raw_region: RegionDescriptor | None = None
        self._rotate_at = 0.0
        self._mode = Mode(config.mode)
        listener = PeerListener(
            config.listen_host,
            config.listen_port,
            allow_wildcard=bool(config.advertise_host),
            advertise_host=config.advertise_host or None,
        )
        try:
            self._sidecar = Sidecar(
                self,
                role="prefill",
                socket_dir=config.socket_dir,
                host=config.listen_host,
                transport=config.transport,
                slots=config.slots,
                move=gather_segment,
                num_threads=config.num_threads,
            )
        except BaseException:
            listener.close()
            raise
        self.endpoint = listener.endpoint
        self.incarnation = self._sidecar.incarnation
        self._core = PrefillCore(SlotTable(config.slots.num_slots, SENDER_MOVES), self._mode)
        self._links = PeerLinks(listener, self._sidecar, self._core, config.peer_timeout_s)
        self._sidecar.watch(self._sidecar.mover, self._poll_gathers)
        self._sidecar.watch(self._sidecar.transport, self._poll_writes)

    def run(self) -> None:
        """Serve until `stop()`; then end what is open and say goodbye."""
        self._sidecar.run()
        now = time.monotonic()
        self._core.fail_all(Reason.SHUTDOWN, "the prefill agent is shutting down", now)
        self.perform(now)
        self._links.say_goodbye()

    def stop(self) -> None:
        """End `run()` soon; may be called from a signal handler or another thread."""
        self._sidecar.stop()

    def close(self) -> None:
        """Give everything back."""
        self._sidecar.close()
        self._links.close()

    # ---- the worker ----

    def worker_attached(self, layout: PoolLayout, now: float) -> WorkerReply:
        """A worker has handed over its pool; peers that were paired with another one must pair anew."""
        self._links.lose_all(Reason.PEER_LOST, now)
        self._core.attach_worker(layout)
        if self._mode is Mode.RAW:
            assert self._sidecar.pool is not None
            memory = self._sidecar.pool.memory
            self._raw_region = self._sidecar.transport.register(Region(memory.address, memory.num_bytes, memory.fd))
        return Attached(incarnation=self.incarnation, source=self._source())

    def worker_lost(self, now: float) -> None:
        """The worker's end was seen."""
        self._core.worker_lost(now)
        self.perform(now)
        self._links.lose_all(Reason.WORKER_LOST, now)

    def worker_request(self, message: Message, now: float) -> WorkerReply:
        """Tickets, submits, aborts."""
        match message:
            case NewTicket():
                transfer = new_id()
                self._core.new_ticket(transfer, message.deadline_s, now)
                return TicketMade(ticket=Ticket(transfer=transfer, sources=(self._source(), *message.sources)))
            case Submit():
                self._core.submit(message, now)
                return Ok()
            case AbortTransfer():
                self._core.abort(message.transfer, now)
                return Ok()
            case _:
                raise RefusedError(f"a prefill agent does not serve {type(message).__name__}")

    def is_pool_quiet(self) -> bool:
        """Whether nothing reads the worker's pool; a raw region is given back then."""
        if self._core.num_reading_pool:
            return False
        if self._raw_region is not None:
            self._sidecar.transport.deregister(self._raw_region)
            self._raw_region = None
        return True

    def _source(self) -> Source:
        return Source(endpoint=self.endpoint, incarnation=self.incarnation)

    # ---- actions and their ends ----

    def tick(self, now: float) -> None:
        """Deadlines, peers that were silent for too long, and slots that only a new engine can free."""
        self._links.tick(now)
        self._core.tick(now)
        if self._core.needs_rotation and now >= self._rotate_at:
            self._rotate_at = now + _ROTATE_EVERY_S
            self._rotate(now)

    def _rotate(self, now: float) -> None:
        """Replace the engine: writes with an unknown end can read no slot any more."""
        try:
            self._sidecar.transport.rotate()
        except TransportError:
            self._sidecar.log.exception("cannot replace the engine")
            return
        self._poll_writes(now)  # those that the old engine took with it are reported by now
        self._core.rotated(now)

    def perform(self, now: float) -> None:
        """Do what the core asks for, and what follows from it."""
        while actions := self._core.take_actions():
            for action in actions:
                match action:
                    case SendToPeer():
                        self._links.send(action.peer, action.message)
                    case Notify():
                        self._sidecar.notify(action.event)
                    case Gather():
                        slot = self._sidecar.slots.view(action.slot)
                        pool = self._sidecar.pool_array()
                        self._sidecar.mover.submit(
                            action.operation, pool, action.source, action.segment, slot, action.cancel
                        )
                    case Write():
                        self._write(action, now)

    def _write(self, write: Write, now: float) -> None:
        """Post a write, unless its leg was stopped just now."""
        if write.cancel.is_set or write.peer not in self._links:
            self._core.write_ended(write.operation, Outcome.FAILED, "was not posted", now)
            return
        try:
            write_id = self._sidecar.transport.submit_write(write.peer, self._batch(write))
        except TransportError as error:
            self._core.write_ended(write.operation, Outcome.FAILED, str(error), now)
            return
        self._writes[write_id] = write

    def _batch(self, write: Write) -> WriteBatch:
        hello = self._links.hello(write.peer)
        region = RegionDescriptor(hello.region_id, hello.region_bytes)
        dst_offset = write.notice.slot * hello.slot_bytes
        if write.runs is None:
            assert write.src_slot is not None
            src = np.array([self._sidecar.slots.address(write.src_slot)], dtype=np.uint64)
            lengths = np.array([write.notice.num_bytes], dtype=np.uint64)
            return WriteBatch(region, src, np.array([dst_offset], dtype=np.uint64), lengths)
        runs = write.runs
        assert self._sidecar.pool is not None
        src = runs.src_offsets.astype(np.uint64) + np.uint64(self._sidecar.pool.memory.address)
        dst = runs.slot_offsets.astype(np.uint64) + np.uint64(dst_offset)
        return WriteBatch(region, src, dst, runs.lengths.astype(np.uint64))

    def _poll_gathers(self, now: float) -> None:
        for moved in self._sidecar.mover.poll():
            self._core.gather_ended(moved.operation, now, moved.busy_s, moved.error, was_begun=moved.was_begun)

    def _poll_writes(self, now: float) -> None:
        for completion in self._sidecar.transport.poll():
            write = self._writes.pop(completion.write_id, None)
            if write is None:
                self._links.probe_ended(completion, now)
                continue
            if completion.outcome is Outcome.DONE:
                # The engine has proven the bytes to be in the peer's memory: only now is the peer told.
                self._links.send(write.peer, write.notice)
            self._core.write_ended(write.operation, completion.outcome, completion.detail, now)
