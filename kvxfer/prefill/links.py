"""Connections to decode agents, from hello to goodbye: what the prefill agent hears and says there."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

import msgspec

from kvxfer.control.codec import encode, encode_all
from kvxfer.control.doorkeeper import DoorCounts
from kvxfer.control.heartbeat import LOOK_EVERY_S, PeerLife
from kvxfer.control.messages import (
    AbortLeg,
    Goodbye,
    Hello,
    Message,
    NewRegion,
    PrefillToDecode,
    Refused,
    RegionTaken,
    Welcome,
)
from kvxfer.control.peer_channel import PeerListener, incarnation_of
from kvxfer.errors import ProtocolError, RefusedError, TransportError
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.pairing import Paired, Prober, Unpaired, check_hello
from kvxfer.sidecar import Sidecar
from kvxfer.slot_memory import PROBE_BYTES
from kvxfer.transfer import Reason
from kvxfer.transports.base import Completion


@dataclass(slots=True)
class _Peer:
    """A decode agent that has said hello, and the connection on which it did."""

    sender: bytes
    hello: Hello
    life: PeerLife
    is_full: bool = False  # it did not take a message, which is lost
    outgoing: list[PrefillToDecode] = field(default_factory=list)  # that leave with the next `flush`


class PeerLinks:
    """All decode agents that this agent talks to. Owns the listener; `close()` ends it."""

    def __init__(
        self, listener: PeerListener, sidecar: Sidecar, core: PrefillCore, peer_timeout_s: float, pull_path: str
    ) -> None:
        """`pull_path` is where agents of this host get the pool, empty where it is not shared."""
        self._listener = listener
        self._sidecar = sidecar
        self._core = core
        self._peer_timeout_s = peer_timeout_s
        self._pull_path = pull_path
        self._peers: dict[str, _Peer] = {}  # by incarnation
        self._names: dict[bytes, str] = {}  # incarnation by connection
        self._addressed: list[_Peer] = []  # for whom there is something to `flush`
        self._look_at = 0.0
        self._prober = Prober(sidecar.transport, lambda: sidecar.slots.probe_address, PROBE_BYTES, time.perf_counter)
        sidecar.watch(listener, self._receive)

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def hello(self, peer: str) -> Hello:
        """What a known peer said of itself."""
        return self._peers[peer].hello

    @property
    def door(self) -> DoorCounts:
        """What became of connections so far."""
        return self._listener.counts

    def close(self) -> None:
        self._listener.close()

    def _receive(self, now: float) -> None:
        def handle(sender: bytes, message: Message, _request_id: int) -> None:
            peer = self._names.get(sender)
            if peer is not None:
                # Not when the turn began: a message before this one may have held the loop for long.
                self._peers[peer].life.heard(time.monotonic())
            match message:
                case Hello():
                    self._hello(sender, message, now)
                case AbortLeg() if peer is None:
                    self._core.receive("", message, now)
                case _ if peer is None:
                    # It was paired with an earlier run at this address, or we have given it up.
                    self._listener.send(sender, encode(Goodbye(incarnation=self._sidecar.incarnation)))
                case Goodbye():
                    self._forget(peer, Reason.PEER_LOST, now, said_goodbye=True)
                case NewRegion():
                    self._renew_region(peer, message, now)
                case _:
                    self._core.receive(peer, message, now)  # type: ignore[arg-type]

        self._sidecar.drain(self._listener, handle)

    def _hello(self, sender: bytes, hello: Hello, now: float) -> None:
        sidecar = self._sidecar
        if hello.incarnation.encode() != incarnation_of(sender):
            raise ProtocolError(f"hello: incarnation: got {hello.incarnation}, expected the name of the connection")
        self._forget(self._names.get(sender, ""), Reason.PEER_LOST, now)
        try:
            if sidecar.pool is None:
                self._core.check_admission()  # a worker that leaves an agent which is shutting down is not the cause
            info = check_hello(
                hello,
                incarnation=self._sidecar.incarnation,
                transport=sidecar.transport.name,
                layout=sidecar.pool.layout if sidecar.pool is not None else None,
                slot_bytes=sidecar.slots.slot_bytes,
                host=self._listener.last_host,
            )
        except RefusedError as error:
            # A pairing of the same agent on another connection stays: this one may follow an outdated ticket.
            sidecar.log.warning("refused decode agent %s: %s", hello.incarnation, error)
            refusal = Refused(reason=error.reason, detail=error.detail[:2000], field=error.field)
            self._listener.send(sender, encode(refusal))
            return
        self._forget(hello.incarnation, Reason.PEER_LOST, now)
        self._peers[hello.incarnation] = _Peer(sender, hello, PeerLife(now))
        self._names[sender] = hello.incarnation
        unpaired = self._prober.begin(hello, info)
        if unpaired is not None:
            self._unpaired(unpaired, now)

    def _renew_region(self, peer: str, message: NewRegion, now: float) -> None:
        """The peer's landing slots have moved; no credit for the old ones is out. It may say so again."""
        known = self._peers[peer]
        if message.region_id < known.hello.region_id:
            return
        if message.region_id == known.hello.region_id:
            # Told again: the engine has it, and to give it a peer anew could end writes that are under way.
            self.send(peer, RegionTaken(region_id=message.region_id))
            return
        known.hello = msgspec.structs.replace(
            known.hello, metadata=message.metadata, region_id=message.region_id, region_bytes=message.region_bytes
        )
        try:
            self._sidecar.transport.add_peer(peer, message.metadata)
        except (TransportError, ProtocolError) as error:
            self._sidecar.log.warning("decode agent %s: its new region cannot be used: %s", peer, error)
            self.lose(peer, Reason.PEER_LOST, now)
            return
        self._core.region_moved(peer, message.region_id)
        self.send(peer, RegionTaken(region_id=message.region_id))

    def _paired(self, paired: Paired) -> None:
        peer = paired.info.incarnation
        pool = self._sidecar.pool
        if pool is None or peer not in self._peers:
            return
        figures = paired.figures
        self._core.peer_paired(dataclasses.replace(paired.info, figures=figures))
        self._sidecar.log.info(
            "paired with decode agent %s: path %s, %.2f us a descriptor, %.2f GB/s",
            peer,
            figures.path,
            figures.descriptor_s * 1e6,
            figures.bytes_per_s / 1e9,
        )
        self.send(
            peer,
            Welcome(
                incarnation=self._sidecar.incarnation,
                pool=pool.pool,
                layout=pool.layout,
                segment_bytes=paired.info.segment_bytes,
                figures=figures,
                pull_path=self._pull_path if pool.for_peers() is not None else "",
            ),
        )

    def _unpaired(self, unpaired: Unpaired, now: float) -> None:
        self._sidecar.log.warning("cannot pair with %s: %s", unpaired.incarnation, unpaired.refusal.detail)
        self.send(unpaired.incarnation, unpaired.refusal)
        self.lose(unpaired.incarnation, Reason.PEER_LOST, now)

    def lose(self, peer: str, reason: Reason, now: float) -> None:
        """Give a peer up, and tell it."""
        if peer in self._peers:
            self.send(peer, Goodbye(incarnation=self._sidecar.incarnation))
            self.flush()
            self._forget(peer, reason, now)

    def _forget(self, peer: str, reason: Reason, now: float, *, said_goodbye: bool = False) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            del self._names[known.sender]
            known.outgoing.clear()
            self._core.peer_gone(peer, reason, now, said_goodbye=said_goodbye)
            self._sidecar.transport.drop_peer(peer)

    def send(self, peer: str, message: PrefillToDecode) -> None:
        """To a peer, if it is one, with the next `flush()`."""
        known = self._peers.get(peer)
        if known is not None:
            if not known.outgoing:
                self._addressed.append(known)
            known.outgoing.append(message)

    def flush(self) -> None:
        """Send what there is for every peer, in as few frames as can be."""
        addressed, self._addressed = self._addressed, []
        for peer in addressed:
            for frame in encode_all(peer.outgoing):
                if not self._listener.send(peer.sender, frame):
                    peer.is_full = True  # or it is gone: the next tick gives it up
                    break
            peer.outgoing.clear()

    def lose_all(self, reason: Reason, now: float) -> None:
        """Give every peer up."""
        for peer in list(self._peers):
            self.lose(peer, reason, now)

    def say_goodbye(self, now: float) -> None:
        """This run ends. Those who have just said hello hear of it as well."""
        self._receive(now)
        for peer in self._peers:
            self.send(peer, Goodbye(incarnation=self._sidecar.incarnation))
        self.flush()

    def tick(self, now: float) -> None:
        """Give up peers that are gone; tell who did not get in."""
        for news in self._listener.news():
            self._sidecar.log.warning("%s", news)
        # A turn that was held up judges nobody by its old clock: the next one does.
        if now >= self._look_at and time.monotonic() < now + LOOK_EVERY_S:
            self._look_at = now + LOOK_EVERY_S
            self._receive(now)  # what came while the loop was held counts first
            for name in list(self._peers):
                self._look_after(name, now)

    def _look_after(self, name: str, now: float) -> None:
        peer = self._peers[name]
        if peer.is_full:
            self._sidecar.log.warning("decode agent %s does not take messages", name)
        elif not peer.life.look(now, self._peer_timeout_s, is_there=self._listener.is_alive(peer.sender)):
            self._sidecar.log.warning("decode agent %s has given no sign of life for too long", name)
        else:
            return
        self.lose(name, Reason.PEER_LOST, now)

    def probe_ended(self, completion: Completion, now: float) -> None:
        """A write that is none of the core's has ended: a measurement goes on, or a pairing is complete."""
        match self._prober.ended(completion):
            case Paired() as paired:
                self._paired(paired)
            case Unpaired() as unpaired:
                self._unpaired(unpaired, now)
            case None:
                return
