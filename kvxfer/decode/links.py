"""Connections to prefill agents, from hello to goodbye: what the decode agent hears and says there."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvxfer.control.heartbeat import Heartbeat, return_s
from kvxfer.control.messages import (
    DecodeToPrefill,
    Goodbye,
    Hello,
    Message,
    NewRegion,
    Ping,
    Refused,
    RegionTaken,
    Source,
    Welcome,
)
from kvxfer.control.peer_channel import Connection, Credentials
from kvxfer.decode.core import DecodeCore
from kvxfer.decode.pairing import PrefillPeer
from kvxfer.decode.source_pools import SourcePool, SourcePools
from kvxfer.errors import ControlError, RefusedError
from kvxfer.ops.config import DecodeConfig
from kvxfer.sidecar import Sidecar
from kvxfer.slot_memory import PROBE_BYTES
from kvxfer.transfer import Reason

_PINGS_PER_TIMEOUT = 4


class SourceLinks:
    """All prefill agents that this agent talks to. `close()` hangs up on all of them."""

    def __init__(self, config: DecodeConfig, credentials: Credentials, sidecar: Sidecar, core: DecodeCore) -> None:
        self._config = config
        self._credentials = credentials
        self._sidecar = sidecar
        self._core = core
        self._peers: dict[str, PrefillPeer] = {}  # by incarnation
        self._num_connections = 0
        self._pools = SourcePools(sidecar, self._tell_core)

    def source_pool(self, incarnation: str) -> SourcePool | None:
        """The pool of a prefill agent, where rows can be pulled from it."""
        return self._pools.get(incarnation)

    def paths(self) -> list[str]:
        """How the engine of each paired prefill agent reaches this side. May be called from another thread."""
        return [peer.path for peer in list(self._peers.values()) if peer.is_paired]

    def send(self, incarnation: str, message: DecodeToPrefill) -> None:
        """To a prefill agent, if it is one, with the next `flush()`."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.send(message)

    def flush(self, now: float) -> bool:
        """Send what there is for every prefill agent. One that does not take it is as good as lost: whether there was
        one, so that the core has more to say."""
        full = [incarnation for incarnation, peer in self._peers.items() if peer.outgoing and not peer.flush()]
        for incarnation in full:
            self.lose(incarnation, Reason.PEER_LOST, "does not take messages", now)
        return bool(full)

    @property
    def bytes_per_s(self) -> float:
        """The measured rate of the fastest path from a peer, 0 without one."""
        return max((peer.bytes_per_s for peer in self._peers.values()), default=0.0)

    def renew_region(self, now: float) -> None:
        """The landing slots have moved: tell every prefill agent, before any credit for them goes out."""
        region = self._sidecar.region
        metadata = self._sidecar.transport.metadata()
        message = NewRegion(metadata=metadata, region_id=region.region_id, region_bytes=region.num_bytes)
        for incarnation, peer in list(self._peers.items()):
            if peer.is_paired:
                peer.new_region, peer.region_told_at = message, now
                peer.send(message)
                continue
            # It may refuse us for the old region: on a new connection that answer goes nowhere.
            del self._peers[incarnation]
            self._hang_up(peer)
            self.pair(peer.source, now)

    def close(self) -> None:
        for peer in self._peers.values():
            self._hang_up(peer)
        self._peers.clear()

    def tick(self, now: float) -> None:
        """Tell the floor, look after pulls; give up those that are gone."""
        news = self._credentials.reload()
        if news is not None:
            self._sidecar.log.warning("%s", news)
        timeout_s = self._config.peer_timeout_s
        for incarnation, peer in list(self._peers.items()):
            if not peer.is_paired:
                if now - peer.began_at > timeout_s:
                    detail = f"did not pair within {timeout_s} s: is it running and reachable there?"
                    self.lose(incarnation, Reason.PEER_UNREACHABLE, detail, now)
            elif (away_s := peer.absence.look(now, is_there=peer.heartbeat.is_up())) > return_s(timeout_s):
                detail = f"its connection has ended, and it has not come back within {away_s:.1f} s"
                self.lose(incarnation, Reason.PEER_LOST, detail, now)
            else:
                self._pools.tick(peer, now)
                peer.tell_region_again(now)
                if now - peer.pinged_at > timeout_s / _PINGS_PER_TIMEOUT:
                    peer.pinged_at = now
                    peer.send(Ping(incarnation=self._sidecar.incarnation, floor=self._core.floor()))

    def pair(self, source: Source, now: float) -> None:
        """Connect to a prefill agent and say hello, unless that is under way."""
        if source.incarnation in self._peers:
            return
        try:
            # A name of its own: an outdated ticket may lead to the same address, and be refused there.
            self._num_connections += 1
            name = f"{self._sidecar.incarnation}-{self._num_connections:x}"
            connection = Connection(source.endpoint, name, self._credentials, source.key)
            timeout_s = self._config.peer_timeout_s
            try:
                heartbeat = Heartbeat(source.endpoint, name, self._credentials, source.key, timeout_s)
            except BaseException:
                connection.close()
                raise
        except ControlError as error:  # also where this process may open nothing more
            self._core.peer_gone(source.incarnation, Reason.PEER_UNREACHABLE, str(error), now)
            return
        peer = PrefillPeer(source, connection, heartbeat, self._hello(source), now)
        self._peers[source.incarnation] = peer
        self._sidecar.watch(connection, lambda at: self._receive(peer, at))
        peer.send(peer.hello)

    def _hello(self, source: Source) -> Hello:
        sidecar = self._sidecar
        assert sidecar.pool is not None
        return Hello(
            incarnation=self._sidecar.incarnation,
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
            verify=self._config.verify == "full",
        )

    def _receive(self, peer: PrefillPeer, now: float) -> None:
        def handle(_sender: bytes, message: Message, _request_id: int) -> None:
            match message:
                case Welcome() if not peer.is_paired:
                    self._welcomed(peer, message, now)
                case Refused() if not peer.is_paired:
                    detail = f"{message.field}: {message.detail}" if message.field else message.detail
                    self.lose(peer.source.incarnation, message.reason or Reason.PEER_REFUSED, detail, now)
                case Goodbye():
                    self.lose(peer.source.incarnation, Reason.PEER_LOST, self._explain_goodbye(), now, logging.INFO)
                case RegionTaken():
                    peer.region_taken(message)
                case _ if peer.is_paired:
                    self._core.receive(peer.source.incarnation, message, now)  # type: ignore[arg-type]

        self._sidecar.drain(peer.connection, handle)
        if peer.connection.refusal:
            self.lose(peer.source.incarnation, Reason.PEER_REFUSED, peer.connection.refusal, now)

    def _explain_goodbye(self) -> str:
        """One that comes when this agent itself was away for long is an answer to that."""
        held_s = self._sidecar.held_s
        if held_s < self._config.peer_timeout_s / 2:
            return "it said goodbye"
        return f"it said goodbye, after this agent itself was stopped or held up for {held_s:.1f} s"

    def _welcomed(self, peer: PrefillPeer, welcome: Welcome, now: float) -> None:
        try:
            info = peer.welcomed(welcome)
        except RefusedError as error:
            self.lose(peer.source.incarnation, error.reason or Reason.PEER_REFUSED, str(error), now)
            return
        peer.is_paired = True
        figures = welcome.figures
        peer.path, peer.bytes_per_s = figures.path, figures.bytes_per_s
        self._sidecar.log.info(
            "paired with prefill agent %s: path %s, %.2f us a descriptor, %.2f GB/s",
            info.incarnation,
            figures.path,
            figures.descriptor_s * 1e6,
            figures.bytes_per_s / 1e9,
        )
        peer.info = info
        self._pools.begin(peer, welcome, now)

    def _tell_core(self, peer: PrefillPeer, now: float, pull_trouble: str) -> None:
        """Pairing is complete; without `pull_trouble`, rows can be pulled out of the source's pool."""
        assert peer.info is not None
        pool = self._pools.get(peer.source.incarnation)
        layout = pool.layout if pool is not None else None
        self._core.peer_paired(replace(peer.info, layout=layout, pull_trouble=pull_trouble), now)

    def lose(self, incarnation: str, reason: Reason, detail: str, now: float, log_level: int = logging.WARNING) -> None:
        """Give a prefill agent up, tell it, and end what it feeds."""
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        for abort in self._core.aborts_for(incarnation, reason, detail):
            peer.send(abort)
        peer.send(Goodbye(incarnation=self._sidecar.incarnation))
        peer.flush()
        self._hang_up(peer)
        detail = f"prefill agent at {peer.source.endpoint}: {detail}"
        self._sidecar.log.log(log_level, "%s", detail)
        self._core.peer_gone(incarnation, reason, detail, now)

    def _hang_up(self, peer: PrefillPeer) -> None:
        self._sidecar.unwatch(peer.connection)
        self._pools.end(peer)
        peer.close()

    def lose_all(self, reason: Reason, detail: str, now: float) -> None:
        for incarnation in list(self._peers):
            self.lose(incarnation, reason, detail, now, logging.INFO)
