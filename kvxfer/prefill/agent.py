"""The prefill agent: performs what its core asks for, beside a prefill worker."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kvxfer.control.channel import PeerListener
from kvxfer.control.codec import encode
from kvxfer.control.ids import new_id
from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    Goodbye,
    Hello,
    Message,
    NewTicket,
    NotReady,
    Ok,
    Ping,
    PrefillToDecode,
    Refused,
    Source,
    Submit,
    Ticket,
    TicketMade,
    Welcome,
    WorkerReply,
)
from kvxfer.errors import RefusedError, TransportError
from kvxfer.layout import PoolLayout
from kvxfer.ops.config import PrefillConfig
from kvxfer.prefill.actions import Gather, Notify, SendToPeer, Write
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.leg import Mode
from kvxfer.prefill.pairing import Paired, Prober, Unpaired, check_hello
from kvxfer.rows_host import gather_segment
from kvxfer.sidecar import PROBE_BYTES, Sidecar
from kvxfer.slots import SENDER_MOVES, SlotTable
from kvxfer.transfer import Reason
from kvxfer.transports.base import Completion, Outcome, Region, RegionDescriptor, WriteBatch

_PINGS_PER_TIMEOUT = 4


@dataclass(slots=True)
class _Peer:
    """A decode agent that has said hello."""

    hello: Hello
    heard_at: float
    pinged_at: float = 0.0


class PrefillAgent:
    """One prefill agent. `endpoint` is where decode agents reach it, `incarnation` the id of this run."""

    def __init__(self, config: PrefillConfig) -> None:
        """Listen, make the slots, start the engine. Raises `ConfigError`, `EngineMissingError`, `TransportError`."""
        self._peer_timeout_s = config.peer_timeout_s
        self._peers: dict[str, _Peer] = {}
        self._writes: dict[int, Write] = {}
        self._raw_region: RegionDescriptor | None = None
        self._mode = Mode(config.mode)
        self._listener = PeerListener(
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
            self._listener.close()
            raise
        self.endpoint = self._listener.endpoint
        self.incarnation = self._sidecar.incarnation
        slots = self._sidecar.slots
        self._core = PrefillCore(SlotTable(slots.num_slots, SENDER_MOVES), self._mode)
        probe_address = slots.memory.address + slots.probe_offset_bytes
        self._prober = Prober(self._sidecar.transport, probe_address, PROBE_BYTES, time.perf_counter)
        self._sidecar.watch(self._listener, self._receive_from_peers)
        self._sidecar.watch(self._sidecar.mover, self._poll_gathers)
        self._sidecar.watch(self._sidecar.transport, self._poll_writes)

    def run(self) -> None:
        """Serve until `stop()`; then end what is open and say goodbye."""
        self._sidecar.run()
        now = time.monotonic()
        self._core.fail_all(Reason.SHUTDOWN, "the prefill agent is shutting down", now)
        self.perform(now)
        for peer in list(self._peers):
            self._send(peer, Goodbye(incarnation=self.incarnation))

    def stop(self) -> None:
        """End `run()` soon; may be called from a signal handler or another thread."""
        self._sidecar.stop()

    def close(self) -> None:
        """Give everything back."""
        self._sidecar.close()
        self._listener.close()

    # ---- the worker ----

    def worker_attached(self, layout: PoolLayout, now: float) -> WorkerReply:
        """A worker has handed over its pool; peers that were paired with another one must pair anew."""
        for peer in list(self._peers):
            self._lose_peer(peer, Reason.PEER_LOST, now)
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
        for peer in list(self._peers):
            self._lose_peer(peer, Reason.WORKER_LOST, now)

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

    # ---- peers ----

    def _receive_from_peers(self, now: float) -> None:
        def handle(sender: bytes, message: Message, _request_id: int) -> None:
            peer = sender.decode("ascii", "replace")
            if peer in self._peers:
                self._peers[peer].heard_at = now
            match message:
                case Hello():
                    self._hello(peer, message, now)
                case Goodbye():
                    self._lose_peer(peer, Reason.PEER_LOST, now)
                case _ if peer in self._peers:
                    self._core.receive(peer, message, now)  # type: ignore[arg-type]
                case _:
                    # It was paired with an earlier run at this address, or we have given it up.
                    self._listener.send(sender, encode(Goodbye(incarnation=self.incarnation)))

        self._sidecar.drain(self._listener, handle)

    def _hello(self, peer: str, hello: Hello, now: float) -> None:
        sidecar = self._sidecar
        if sidecar.pool is None or hello.incarnation != peer:
            self._listener.send(peer.encode(), encode(NotReady()))
            return
        self._forget_peer(peer, Reason.PEER_LOST, now)
        try:
            info = check_hello(
                hello,
                incarnation=self.incarnation,
                transport=sidecar.transport.name,
                layout=sidecar.pool.layout,
                slot_bytes=sidecar.slots.slot_bytes,
            )
        except RefusedError as error:
            sidecar.log.warning("refused decode agent %s: %s", peer, error)
            refusal = Refused(reason=error.reason, detail=error.detail[:2000], field=error.field)
            self._listener.send(peer.encode(), encode(refusal))
            return
        self._peers[peer] = _Peer(hello, now)
        unpaired = self._prober.begin(hello, info)
        if unpaired is not None:
            self._unpaired(unpaired, now)

    def _paired(self, paired: Paired) -> None:
        peer = paired.info.incarnation
        pool = self._sidecar.pool
        if pool is None or peer not in self._peers:
            return
        self._core.peer_paired(paired.info)
        figures = paired.figures
        self._sidecar.log.info(
            "paired with decode agent %s: path %s, %.2f us a descriptor, %.2f GB/s",
            peer,
            figures.path,
            figures.descriptor_s * 1e6,
            figures.bytes_per_s / 1e9,
        )
        self._send(
            peer,
            Welcome(
                incarnation=self.incarnation,
                pool=pool.pool,
                layout=pool.layout,
                segment_bytes=paired.info.segment_bytes,
                figures=figures,
            ),
        )

    def _unpaired(self, unpaired: Unpaired, now: float) -> None:
        self._sidecar.log.warning("cannot pair with %s: %s", unpaired.incarnation, unpaired.refusal.detail)
        self._send(unpaired.incarnation, unpaired.refusal)
        self._lose_peer(unpaired.incarnation, Reason.PEER_LOST, now)

    def _lose_peer(self, peer: str, reason: Reason, now: float) -> None:
        """Give a peer up, and tell it."""
        if peer in self._peers:
            self._listener.send(peer.encode(), encode(Goodbye(incarnation=self.incarnation)))
            self._forget_peer(peer, reason, now)

    def _forget_peer(self, peer: str, reason: Reason, now: float) -> None:
        if self._peers.pop(peer, None) is not None:
            self._core.peer_gone(peer, reason, now)
            self._sidecar.transport.drop_peer(peer)

    def _send(self, peer: str, message: PrefillToDecode) -> None:
        if peer in self._peers and not self._listener.send(peer.encode(), encode(message)):
            self._peers[peer].heard_at = -np.inf  # its queue is full, or it is gone: the next tick gives it up

    # ---- actions and their ends ----

    def tick(self, now: float) -> None:
        """Deadlines, and peers that were silent for too long."""
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at > self._peer_timeout_s:
                self._sidecar.log.warning("decode agent %s was silent for %.1f s", name, now - peer.heard_at)
                self._lose_peer(name, Reason.PEER_LOST, now)
            elif now - peer.pinged_at > self._peer_timeout_s / _PINGS_PER_TIMEOUT:
                peer.pinged_at = now
                self._send(name, Ping(incarnation=self.incarnation))
        self._core.tick(now)

    def perform(self, now: float) -> None:
        """Do what the core asks for, and what follows from it."""
        while actions := self._core.take_actions():
            for action in actions:
                match action:
                    case SendToPeer():
                        self._send(action.peer, action.message)
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
        if write.cancel.is_set or write.peer not in self._peers:
            self._core.write_ended(write.operation, Outcome.FAILED, "was not posted", now)
            return
        try:
            write_id = self._sidecar.transport.submit_write(write.peer, self._batch(write))
        except TransportError as error:
            self._core.write_ended(write.operation, Outcome.FAILED, str(error), now)
            return
        self._writes[write_id] = write

    def _batch(self, write: Write) -> WriteBatch:
        hello = self._peers[write.peer].hello
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
                self._probe_ended(completion, now)
                continue
            if completion.outcome is Outcome.DONE:
                # The engine has proven the bytes to be in the peer's memory: only now is the peer told.
                self._send(write.peer, write.notice)
            self._core.write_ended(write.operation, completion.outcome, completion.detail, now)

    def _probe_ended(self, completion: Completion, now: float) -> None:
        match self._prober.ended(completion):
            case Paired() as paired:
                self._paired(paired)
            case Unpaired() as unpaired:
                self._unpaired(unpaired, now)
            case None:
                return
