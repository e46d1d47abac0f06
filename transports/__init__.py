"""Transports: what moves bytes into a peer's registered regions. `base.Transport` is the contract."""

from kvxfer.transports.base import (
    Completion,
    ContiguousWrite,
    Counters,
    Limits,
    MemoryKind,
    Outcome,
    Region,
    RegionDescriptor,
    Transport,
    WriteBatch,
)
from kvxfer.transports.registry import TRANSPORT_NAMES, create_transport, exit_process

__all__ = [
    "TRANSPORT_NAMES",
    "Completion",
    "ContiguousWrite",
    "Counters",
    "Limits",
    "MemoryKind",
    "Outcome",
    "Region",
    "RegionDescriptor",
    "Transport",
    "WriteBatch",
    "create_transport",
    "exit_process",
]
