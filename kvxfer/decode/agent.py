"""The decode agent: performs what its core asks for, beside a decode worker. It never listens to the network."""

from __future__ import annotations

import time

from kvxfer.control.channel import Connection
from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    Goodbye,
    Hello,
    Message,
    NewRegion,
    NotReady,
    Ok,
    Open,
    Ping,
    Refused,
    Source,
    Welcome,
    WorkerReply,
)
from kvxfer.decode.actions import Notify, PairWith, Scatter, SendToPeer
from kvxfer.decode.core import DecodeCore
from kvxfer.decode.pairing import HELLO_AGAIN_S, PrefillPeer
from kvxfer.errors import ProtocolError, RefusedError, TransportError
from kvxfer.layout import PoolLayout
from kvxfer.ops.config import DecodeConfig
from kvxfer.rows_host import scatter_segment
from kvxfer.sidecar import PROBE_BYTES, Sidecar
from kvxfer.slots import LANDING_MOVES, SlotTable
from kvxfer.transfer import Reason

_PINGS_PER_TIMEOUT = 4


class DecodeAgent:
    """One decode agent. `incarnation` is the id of this run; `endpoint` is empty: it connects, it does not listen."""

    endpoint = ""

    def __init__(self, config: DecodeConfig) -> None:
        """Listen for the worker, make the slots, start the engine. Raises `ConfigError`, `EngineMissingError`,
        `TransportError`."""
        self._config = config
        self._peers: dict[str, PrefillPeer] = {}
        self._sidecar = Sidecar(
            self,
            role="decode",
            socket_dir=config.socket_dir,
            host=config.listen_host,
            transport=config.transport,
            slots=config.slots,
            move=scatter_segment,
            num_threads=config.num_threads,
        )
        self.incarnation = self._sidecar.incarnation
        self._core = DecodeCore(SlotTable(config.slots.num_slots, LANDING_MOVES), config.credits_per_leg)
        self._sidecar.watch(self._sidecar.mover, self._poll_scatters)

    def run(self) -> None:
        """Serve until `stop()`; then end what is open and say goodbye."""
        self._sidecar.run()
        now = time.monotonic()
        self._core.fail_all(Reason.SHUTDOWN, "the decode agent is shutting down", now)
        self.perform(now)
        for incarnation in list(self._peers):
            self._lose_peer(incarnation, Reason.SHUTDOWN, "the decode agent is shutting down", now)
        self.perform(now)

    def stop(self) -> None:
        """End `run()` soon; may be called from a signal handler or another thread."""
        self._sidecar.stop()

    def close(self) -> None:
        """Give everything back."""
        for peer in self._peers.values():
            self._sidecar.unwatch(peer.connection)
            peer.connection.close()
        self._peers.clear()
        self._sidecar.close()

    # ---- the worker ----

    def worker_attached(self, layout: PoolLayout, now: float) -> WorkerReply:
        """A worker has handed over its pool; peers that were paired for another one must be paired anew."""
        self._lose_all(Reason.PEER_LOST, "a new worker has attached", now)
        self._core.attach_worker(layout)
        return Attached(incarnation=self.incarnation)

    def worker_lost(self, now: float) -> None:
        """The worker's end was seen."""
        self._core.worker_lost(now)
        self.perform(now)
        self._lose_all(Reason.WORKER_LOST, "the decode worker is gone", now)

    def worker_request(self, message: Message, now: float) -> WorkerReply:
        """Opens and aborts."""
        match message:
            case Open():
                self._core.open(message, now)
                return Ok()
            case AbortTransfer():
                self._core.abort(message.transfer, now)
                return Ok()
            case _:
                raise RefusedError(f"a decode agent does not serve {type(message).__name__}")

    def is_pool_quiet(self) -> bool:
        """Whether nothing writes the worker's pool."""
        return self._core.num_touching_pool == 0

    # ---- peers ----

    def _pair(self, source: Source, now: float) -> None:
        """Connect to a prefill agent and say hello, unless that is under way."""
        if source.incarnation in self._peers:
            return
        try:
            connection = Connection(source.endpoint, self.incarnation)
        except ProtocolError as error:
            self._core.peer_gone(source.incarnation, Reason.PEER_UNREACHABLE, str(error), now)
            return
        peer = PrefillPeer(source, connection, self._hello(source), now, now, hello_at=now)
        self._peers[source.incarnation] = peer
        self._sidecar.watch(connection, lambda at: self._receive(peer, at))
        peer.say_hello(now)

    def _hello(self, source: Source) -> Hello:
        sidecar = self._sidecar
        assert sidecar.pool is not None
        return Hello(
            incarnation=self.incarnation,
            expected_incarnation=source.incarnation,
            pool=sidecar.pool.pool,
            layout=sidecar.pool.layout,
            dst_rank=self._config.dst_rank,
            dst_world=self._config.dst_world,
            transport=sidecar.transport.name,
            metadata=sidecar.transport.metadata(),
            region_id=sidecar.region.region_id,
            region_bytes=sidecar.region.num_bytes,
            slot_bytes=sidecar.slots.slot_bytes,
            num_slots=sidecar.slots.num_slots,
            probe_offset_bytes=sidecar.slots.probe_offset_bytes,
            probe_bytes=PROBE_BYTES,
        )

    def _receive(self, peer: PrefillPeer, now: float) -> None:
        def handle(_sender: bytes, message: Message, _request_id: int) -> None:
            peer.heard_at = now
            match message:
                case Welcome() if not peer.is_paired:
                    self._welcomed(peer, message, now)
                case NotReady() if not peer.is_paired:
                    peer.hello_at = now + HELLO_AGAIN_S
                case Refused() if not peer.is_paired:
                    detail = f"{message.field}: {message.detail}" if message.field else message.detail
                    self._lose_peer(peer.source.incarnation, message.reason or Reason.PEER_REFUSED, detail, now)
                case Goodbye():
                    if peer.is_paired:
                        self._lose_peer(peer.source.incarnation, Reason.PEER_LOST, "it said goodbye", now)
                case Ping():
                    return
                case _ if peer.is_paired:
                    self._core.receive(peer.source.incarnation, message, now)  # type: ignore[arg-type]

        self._sidecar.drain(peer.connection, handle)

    def _welcomed(self, peer: PrefillPeer, welcome: Welcome, now: float) -> None:
        try:
            info = peer.welcomed(welcome)
        except RefusedError as error:
            self._lose_peer(peer.source.incarnation, error.reason or Reason.PEER_REFUSED, str(error), now)
            return
        peer.is_paired = True
        figures = welcome.figures
        self._sidecar.log.info(
            "paired with prefill agent %s: path %s, %.2f us a descriptor, %.2f GB/s",
            info.incarnation,
            figures.path,
            figures.descriptor_s * 1e6,
            figures.bytes_per_s / 1e9,
        )
        self._core.peer_paired(info, now)

    def _lose_peer(self, incarnation: str, reason: Reason, detail: str, now: float) -> None:
        """Give a prefill agent up, tell it, and end what it feeds."""
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        if peer.is_paired:
            peer.send(Goodbye(incarnation=self.incarnation))
        self._sidecar.unwatch(peer.connection)
        peer.connection.close()
        detail = f"prefill agent at {peer.source.endpoint}: {detail}"
        self._sidecar.log.warning("%s", detail)
        self._core.peer_gone(incarnation, reason, detail, now)

    def _lose_all(self, reason: Reason, detail: str, now: float) -> None:
        for incarnation in list(self._peers):
            self._lose_peer(incarnation, reason, detail, now)

    # ---- actions and their ends ----

    def tick(self, now: float) -> None:
        """Deadlines, hellos, and peers that were silent for too long."""
        timeout_s = self._config.peer_timeout_s
        for incarnation, peer in list(self._peers.items()):
            if not peer.is_paired:
                peer.say_hello(now)
                if now - peer.began_at > timeout_s:
                    detail = f"did not pair within {timeout_s} s: is it running and reachable there?"
                    self._lose_peer(incarnation, Reason.PEER_UNREACHABLE, detail, now)
            elif now - peer.heard_at > timeout_s:
                self._lose_peer(incarnation, Reason.PEER_LOST, f"was silent for {now - peer.heard_at:.1f} s", now)
            elif now - peer.pinged_at > timeout_s / _PINGS_PER_TIMEOUT:
                peer.pinged_at = now
                peer.send(Ping(incarnation=self.incarnation, floor=self._core.floor()))
        self._core.tick(now)
        if self._core.may_renew_slots:
            self._renew_slots()

    def _renew_slots(self) -> None:
        """Take other memory for the landing slots and tell every peer, before any credit for it goes out."""
        try:
            self._sidecar.renew_slots()
        except (TransportError, OSError):
            self._sidecar.log.exception("cannot replace quarantined slots")
            return
        region = self._sidecar.region
        message = NewRegion(
            metadata=self._sidecar.transport.metadata(), region_id=region.region_id, region_bytes=region.num_bytes
        )
        for peer in self._peers.values():
            peer.renew_region(message)
        self._core.slots_renewed()

    def perform(self, now: float) -> None:
        """Do what the core asks for, and what follows from it."""
        while actions := self._core.take_actions():
            for action in actions:
                match action:
                    case SendToPeer():
                        peer = self._peers.get(action.peer)
                        if peer is not None and not peer.send(action.message):
                            self._lose_peer(action.peer, Reason.PEER_LOST, "does not take messages", now)
                    case Notify():
                        self._sidecar.notify(action.event)
                    case PairWith():
                        self._pair(action.source, now)
                    case Scatter():
                        slot = self._sidecar.slots.view(action.slot)
                        pool = self._sidecar.pool_array()
                        self._sidecar.mover.submit(
                            action.operation, pool, action.source, action.segment, slot, action.cancel
                        )

    def _poll_scatters(self, now: float) -> None:
        for moved in self._sidecar.mover.poll():
            self._core.scatter_ended(moved.operation, now, moved.busy_s, moved.error)
