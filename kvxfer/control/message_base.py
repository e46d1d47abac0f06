"""Bounds and field types that all messages share, so that nothing from a peer is used before it was checked."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.layout import MAX_GROUPS, TokenRange

PROTOCOL_VERSION = 3
MAX_AUX_BYTES = 64 << 10
MAX_SOURCES = 1024
MAX_PAGES = 1 << 21
MAX_METADATA_BYTES = 1 << 20

Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
"""128 random bits, made by us, in hex: transfers, incarnations, pools. Compared whole."""
Counter = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
TimelineValue = Annotated[int, msgspec.Meta(ge=0)]
"""A 64-bit word without sign: msgpack has no larger integers."""
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
SlotIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
SlotList = Annotated[tuple[SlotIndex, ...], msgspec.Meta(max_length=4096)]
MAX_DEADLINE_S = 86_400.0
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_DEADLINE_S)]
Measure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]  # no NaN, no infinity
Text = Annotated[str, msgspec.Meta(max_length=2000)]
MAX_DECODE_GROUPS = 64
NumDecodeGroups = Annotated[int, msgspec.Meta(ge=1, le=MAX_DECODE_GROUPS)]
Endpoint = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Ranges = Annotated[tuple[TokenRange, ...], msgspec.Meta(max_length=MAX_GROUPS)]
HaveRanges = Annotated[tuple[TokenRange, ...], msgspec.Meta(max_length=1024)]
EngineMetadata = Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
Aux = Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)]
PageBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_PAGES * 4)]
"""Page ids of one group as little-endian uint32, four bytes each."""


class MessageBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: a kind is the class name in snake case."""
