"""Source pools on this host: asked for when a prefill agent is paired, then mapped by who moves the worker's rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvxfer.control.messages import Welcome
from kvxfer.control.pull_share import LeaseWords, PullConnection
from kvxfer.decode.pairing import PrefillPeer
from kvxfer.errors import HandoffError, LayoutError
from kvxfer.layout import PoolLayout
from kvxfer.sidecar import Sidecar

PULL_TIMEOUT_S = 1.0


@dataclass(slots=True, eq=False)
class SourcePool:
    """The pool of one prefill agent, from the request for it on. `index` stands for it once it was asked to be mapped;
    rows may be pulled from it once it `is_mapped`."""

    layout: PoolLayout
    began_at: float
    connection: PullConnection | None
    leases: LeaseWords | None = None
    index: int = -1
    num_bytes: int = 0
    is_mapped: bool = False
    is_told: bool = False  # the core was told, at the latest after `PULL_TIMEOUT_S`


class SourcePools:
    """Of all prefill agents that this agent talks to."""

    def __init__(self, sidecar: Sidecar, tell: Callable[[PrefillPeer, float, str], None]) -> None:
        """`tell(peer, now, trouble)`: rows can be pulled from the peer's pool, or why not. After a time-out it may be
        called a second time, when the pool is mapped after all."""
        self._sidecar = sidecar
        self._tell = tell
        self._pools: dict[str, SourcePool] = {}  # by incarnation

    def get(self, incarnation: str) -> SourcePool | None:
        """The pool of a prefill agent, where rows can be pulled from it."""
        pool = self._pools.get(incarnation)
        return pool if pool is not None and pool.is_mapped else None

    def begin(self, peer: PrefillPeer, welcome: Welcome, now: float) -> None:
        """A prefill agent was paired: ask for its pool, where it may be had."""
        if not welcome.pull_path:
            self._tell(peer, now, "the prefill agent does not share it")
            return
        if self._sidecar.peers is None:
            self._tell(peer, now, "rows of the decode worker's pool are moved by its agent's stream (placement agent)")
            return
        try:
            connection = PullConnection(welcome.pull_path, welcome.incarnation, welcome.pool)
        except HandoffError as error:
            self._refuse(peer, now, str(error))
            return
        self._pools[peer.source.incarnation] = SourcePool(welcome.layout, now, connection)
        self._sidecar.watch(connection, partial(self._poll, peer))

    def tick(self, peer: PrefillPeer, now: float) -> None:
        """Wait no longer than `PULL_TIMEOUT_S`."""
        pool = self._pools.get(peer.source.incarnation)
        if pool is None or pool.is_told or now - pool.began_at < PULL_TIMEOUT_S:
            return
        if pool.connection is not None:
            self.end(peer)
            self._refuse(peer, now, f"the prefill agent did not answer within {PULL_TIMEOUT_S} s")
            return
        pool.is_told = True
        self._refuse(peer, now, f"the decode worker, which must call its client for that, took over {PULL_TIMEOUT_S} s")

    def end(self, peer: PrefillPeer) -> None:
        """Nothing is pulled from the peer's pool any more; what is under way ends by itself."""
        pool = self._pools.pop(peer.source.incarnation, None)
        if pool is None:
            return
        self._hang_up(pool)
        if pool.index >= 0 and self._sidecar.peers is not None:
            self._sidecar.peers.drop(pool.index)
        if pool.leases is not None:
            pool.leases.close()

    def _poll(self, peer: PrefillPeer, now: float) -> None:
        """The source has answered."""
        pool = self._pools[peer.source.incarnation]
        assert pool.connection is not None
        try:
            offered = pool.connection.poll()
        except HandoffError as error:
            self.end(peer)
            self._refuse(peer, now, str(error))
            return
        if offered is None:
            return
        self._hang_up(pool)
        pool.leases, pool.num_bytes = offered.leases, offered.memory.shared.num_bytes
        try:
            pool.layout.check_fits(pool.num_bytes)
        except LayoutError as error:
            offered.memory.close()
            self.end(peer)
            self._refuse(peer, now, str(error))
            return
        assert self._sidecar.peers is not None, "the worker that this agent was paired for is there"
        pool.index = self._sidecar.peers.map(offered.memory, partial(self._answered, peer, pool))

    def _answered(self, peer: PrefillPeer, pool: SourcePool, trouble: str) -> None:
        """Whoever moves rows has mapped the pool, or cannot."""
        now = time.monotonic()
        if trouble:
            pool.index = -1
            self.end(peer)
            if not pool.is_told:
                self._refuse(peer, now, trouble)
            return
        pool.is_mapped = pool.is_told = True
        self._tell(peer, now, "")

    def _refuse(self, peer: PrefillPeer, now: float, trouble: str) -> None:
        self._sidecar.log.info("rows come over the wire: %s", trouble)
        self._tell(peer, now, trouble)

    def _hang_up(self, pool: SourcePool) -> None:
        if pool.connection is not None:
            self._sidecar.unwatch(pool.connection)
            pool.connection.close()
            pool.connection = None
