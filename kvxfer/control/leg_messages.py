"""Messages about one leg: what decode and prefill agents say to each other while a transfer runs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.control.message_base import (
    Aux,
    Counter,
    HaveRanges,
    Id,
    Index,
    MessageBase,
    NumDecodeGroups,
    PageBytes,
    Ranges,
    Seconds,
    SlotIndex,
    SlotList,
    Text,
)
from kvxfer.layout import MAX_GROUPS, LayerRange
from kvxfer.transfer import Reason

# ---- a leg, decode -> prefill ----


class LegMessage(MessageBase, frozen=True, kw_only=True):
    transfer: Id
    generation: Counter


class Grant(LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: send me this. Ranges and `have` are per group, in the order of the route's groups.

    `home`: this prefill agent made the ticket, so it must know the transfer. `remaining_s` is what is left of the
    decode side's deadline. `floor`: generations below it are over.
    """

    home: bool
    wanted: Ranges
    have: Annotated[tuple[HaveRanges, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    remaining_s: Seconds
    floor: Counter
    num_decode_groups: NumDecodeGroups = 1
    """As the ticket says: the transfer is sent when all of them have it."""
    can_pull: bool = False
    """The decode agent has this agent's pool mapped and can pull rows itself."""
    pull_trouble: Text = ""
    """Why it has not."""


class Credits(LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: these landing slots of region `region_id` may be written, once each, by this leg.

    `first`: so many were lent to it before these, so that one told twice counts once, and one that was lost is missed
    (`LegStatus.num_credited`).
    """

    region_id: Counter
    first: Counter
    slots: SlotList


class AbortLeg(LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: stop; answer `Quiesced` when nothing of the leg can be emitted or is in flight."""

    reason: Reason
    detail: Text = ""


class QuiescedAck(LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: `Quiesced` arrived, it need not be sent again."""


class Pulled(LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: all rows of a chunk have been pulled under a valid lease; its pages are read no more."""

    chunk: Index


class Query(LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: how far is the leg? Answered by `LegStatus`."""


# ---- a leg, prefill -> decode ----


class Chunk(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode, before the first segment of a chunk: what the chunk holds. Both sides plan it alike."""

    chunk: Index
    ranges: Ranges
    layers: LayerRange | None
    num_segments: Counter
    num_bytes: Counter


class PullChunk(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode, in place of `Chunk`: the rows of this chunk are for you to pull out of the pool that you have
    mapped. No row may be read before `PullReady` has named the chunk: until then you can only prepare.

    `pages` hold the source's rows of `ranges`, group by group. The rows count only if lease word `lease_word` still
    holds `lease_value` after they were copied.
    """

    chunk: Index
    ranges: Ranges
    layers: LayerRange | None
    num_segments: Counter
    num_bytes: Counter
    pages: Annotated[tuple[PageBytes, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    lease_word: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    lease_value: Counter


class PullReady(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode, after the `PullChunk` of that chunk, maybe at once: its rows are written, pull them."""

    chunk: Index


class Want(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: so many segments (counted over the leg's life) hold a sender slot; credit that many."""

    num_leased: Counter


class Segment(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: a segment's bytes are in the landing slot."""

    chunk: Index
    segment: Index
    slot: SlotIndex
    num_bytes: Counter
    checksum: Annotated[bytes, msgspec.Meta(max_length=9)] = b""
    """`integrity.bind` of the packed bytes, for a peer that verifies: its kind and eight bytes; otherwise empty."""


class Finished(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: the last segment of the last chunk has been written."""

    num_chunks: Counter
    num_segments: Counter
    num_bytes: Counter
    aux: Aux = b""


class LegFailed(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: the leg ends without success; `Quiesced` follows when it is quiet."""

    reason: Reason
    detail: Text = ""


class Quiesced(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: all that was emitted has ended, for ever. `unknown_slots` may still be written to."""

    unknown_slots: SlotList = ()


class LegStatus(LegMessage, frozen=True, kw_only=True):
    """Prefill to decode, answer to `Query`. `state` is a `transfer.LegState` value, or `"unknown"`.

    `segments` are the notices of what was written so far, the newest at most. `num_credited` credits have arrived.
    """

    state: Annotated[str, msgspec.Meta(max_length=32)]
    num_credited: Counter = 0
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=1 << 13)] = ()
    finished: Finished | None = None
