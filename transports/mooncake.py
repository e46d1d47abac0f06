"""Mooncake's transfer engine, over TCP or RDMA."""

from __future__ import annotations

import uuid

from kvxfer.transports._engine_transport import EngineTransport
from kvxfer.transports._mooncake_engine import MAX_PEER_ENTRIES, MooncakeEngine, MooncakeOptions, load_mooncake
from kvxfer.transports.base import Limits, MemoryKind


class MooncakeTransport(EngineTransport):
    """`Transport` over Mooncake 0.3.13, sessions by P2PHANDSHAKE.

    The engine listens on every interface, whatever address it is given (`host` is what it advertises); shield its
    ports by a firewall. A write that it reports as failed may be under way, so its end is `UNKNOWN`. A peer that
    restarted on its old port makes `add_peer` rotate: the engine keeps the dead process's data port for ever.
    """

    name = "mooncake"
    limits = Limits(
        max_entries_per_peer=MAX_PEER_ENTRIES,
        memory_kinds=frozenset({MemoryKind.HOST}),
        failed_write_stops=False,
        rotate_stops_peer_writes=True,
    )

    def __init__(self, incarnation: str, host: str, options: MooncakeOptions | None = None) -> None:
        self._options = options or MooncakeOptions()
        self._module = load_mooncake(self._options)
        self._host = host
        super().__init__(incarnation)

    def _new_engine(self) -> MooncakeEngine:
        endpoint = f"{self._incarnation}-{uuid.uuid4().hex[:8]}"
        return MooncakeEngine(self._module, endpoint, self._host, self._options)
