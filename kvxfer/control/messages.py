"""Every message between processes: one typed struct a kind, msgpack maps with string keys on the wire.

A frame is the envelope `{v, kind, id, body}`; `body` is decoded once the kind is known. Every integer, list and byte
string is bounded here, so that nothing a peer sends is allocated or counted before it was checked.

Roles: `worker` is the engine process, `prefill` and `decode` are the agents. A *leg* is one (prefill agent, decode
agent) pair of a transfer and is named by `(transfer, generation)` on the connection of that pair; `generation` is
counted by one run of the decode agent, so it never repeats on a connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.layout import MAX_GROUPS, LayerRange, PoolLayout, TokenRange
from kvxfer.transfer import EventKind, Reason

PROTOCOL_VERSION = 1
MAX_AUX_BYTES = 64 << 10
MAX_SOURCES = 1024
MAX_PAGES = 1 << 21
MAX_METADATA_BYTES = 1 << 20

Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
"""128 random bits, made by us, in hex: transfers, incarnations, pools. Compared whole."""
Counter = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_SlotIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_Slots = Annotated[tuple[_SlotIndex, ...], msgspec.Meta(max_length=4096)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
_Measure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]  # no NaN, no infinity
_Text = Annotated[str, msgspec.Meta(max_length=2000)]
_Endpoint = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Ranges = Annotated[tuple[TokenRange, ...], msgspec.Meta(max_length=MAX_GROUPS)]
_Have = Annotated[tuple[TokenRange, ...], msgspec.Meta(max_length=1024)]
_Metadata = Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
_Aux = Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)]
_Names = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=16)]
PageBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_PAGES * 4)]
"""Page ids of one group as little-endian uint32, four bytes each."""


class MessageBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: a kind is the class name in snake case."""


# ---- ticket: from the prefill side through any router to the decode side ----


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One prefill agent as decode agents reach it. `key` is its CURVE public key, empty without CURVE."""

    endpoint: _Endpoint
    incarnation: Id
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names one transfer and every prefill agent that feeds it; the first source made the id and knows it."""

    transfer: Id
    sources: Annotated[tuple[Source, ...], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]


# ---- worker <-> agent, over ipc ----


class AttachWorker(MessageBase, frozen=True, kw_only=True):
    """Worker to agent, first message: the pool that was handed off as `pool` is this connection's."""

    pool: Id


class Attached(MessageBase, frozen=True, kw_only=True):
    """Agent to worker: ready. `source` is set on the prefill side."""

    incarnation: Id
    source: Source | None = None


class NewTicket(MessageBase, frozen=True, kw_only=True):
    """Prefill worker to agent: make a ticket. `sources` are the other agents of the same prefill worker group."""

    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=MAX_SOURCES - 1)] = ()
    deadline_s: _Seconds


class TicketMade(MessageBase, frozen=True, kw_only=True):
    """Agent to prefill worker."""

    ticket: Ticket


class GroupPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pages of one group: they hold the local rows of `tokens`, in order. `name` as in the layout."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    tokens: TokenRange
    pages: PageBytes = b""
    have: _Have = ()
    """Decode side only: parts of `tokens` whose rows are already in the pages and need not be sent."""


_GroupPages = Annotated[tuple[GroupPages, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class Submit(MessageBase, frozen=True, kw_only=True):
    """Prefill worker to agent: the KV of one chunk is complete in its pages. A group that is absent has no rows in
    this chunk. `layers` restricts the chunk to some layers. `last` ends the transfer's chunks."""

    transfer: Id
    groups: _GroupPages
    layers: LayerRange | None = None
    last: bool = False
    aux: _Aux = b""
    deadline_s: _Seconds


class Open(MessageBase, frozen=True, kw_only=True):
    """Decode worker to agent: receive the transfer into these pages."""

    ticket: Ticket
    groups: _GroupPages
    deadline_s: _Seconds


class AbortTransfer(MessageBase, frozen=True, kw_only=True):
    """Worker to agent: end the transfer as soon as its pages are quiet."""

    transfer: Id


class Ok(MessageBase, frozen=True, kw_only=True):
    """Agent to worker: accepted."""


class Refused(MessageBase, frozen=True, kw_only=True):
    """Agent to worker, or agent to agent: nothing was changed. `field`, `got` and `expected` where one is to blame."""

    reason: Reason | None = None
    detail: _Text
    field: _Text = ""


class TransferStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one side of a transfer did. Times are sums over segments on the agent's clock, in seconds.

    `num_descriptors` were handed to the engine; `num_runs` is what a per-token sender would have handed to it.
    """

    num_rows: Counter = 0
    num_bytes: Counter = 0
    num_segments: Counter = 0
    num_descriptors: Counter = 0
    num_runs: Counter = 0
    elapsed_s: _Measure = 0.0
    plan_s: _Measure = 0.0
    pack_s: _Measure = 0.0
    send_s: _Measure = 0.0
    scatter_s: _Measure = 0.0


class TransferEvent(MessageBase, frozen=True, kw_only=True):
    """Agent to worker. When a terminal event arrives, no action of the agent touches the transfer's pages any more.

    `aux` has the bytes that each source attached, in the ticket's order (`landed` only).
    """

    transfer: Id
    event: EventKind
    reason: Reason | None = None
    detail: _Text = ""
    aux: Annotated[tuple[_Aux, ...], msgspec.Meta(max_length=MAX_SOURCES)] = ()
    stats: TransferStats = TransferStats()


# ---- pairing, decode -> prefill and back ----


class Hello(MessageBase, frozen=True, kw_only=True):
    """Decode to prefill: who I am, how my pool lies, where you may write.

    `dst_rank` of `dst_world` numbers the agents of this decode group. The landing slots lie at the start of the region,
    one behind the other. The `probe_bytes` from `probe_offset_bytes` on are written by path measurements alone.
    """

    version: Counter = PROTOCOL_VERSION
    incarnation: Id
    expected_incarnation: Id
    pool: Id
    layout: PoolLayout
    dst_rank: _Index
    dst_world: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    transport: Annotated[str, msgspec.Meta(max_length=32)]
    metadata: _Metadata
    region_id: Counter
    region_bytes: Counter
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    probe_offset_bytes: Counter
    probe_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class NewRegion(MessageBase, frozen=True, kw_only=True):
    """Decode to prefill: the landing slots have moved to another region; credits that follow mean that one."""

    metadata: _Metadata
    region_id: Counter
    region_bytes: Counter


class PathFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the wire to one peer did when it was measured."""

    path: Annotated[str, msgspec.Meta(max_length=200)] = "unknown"
    descriptor_s: _Measure = 0.0
    bytes_per_s: _Measure = 0.0


class Welcome(MessageBase, frozen=True, kw_only=True):
    """Prefill to decode: paired. `segment_bytes` is the segment limit of this pair: the smaller slot of the two."""

    version: Counter = PROTOCOL_VERSION
    incarnation: Id
    pool: Id
    layout: PoolLayout
    segment_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    figures: PathFigures


class NotReady(MessageBase, frozen=True, kw_only=True):
    """Prefill to decode: no worker has handed over a pool yet; say hello again later."""


class Goodbye(MessageBase, frozen=True, kw_only=True):
    """Either agent: this run ends; every leg with it is over."""

    incarnation: Id


class Ping(MessageBase, frozen=True, kw_only=True):
    """Either agent: alive. `floor` is the decode agent's lowest live generation (0 from the prefill agent)."""

    incarnation: Id
    floor: Counter = 0


# ---- a leg, decode -> prefill ----


class _LegMessage(MessageBase, frozen=True, kw_only=True):
    transfer: Id
    generation: Counter


class Grant(_LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: send me this. Ranges and `have` are per group, in the order of the route's groups.

    `home`: this prefill agent made the ticket, so it must know the transfer. `remaining_s` is what is left of the
    decode side's deadline. `floor`: generations below it are over.
    """

    home: bool
    wanted: _Ranges
    have: Annotated[tuple[_Have, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    remaining_s: _Seconds
    floor: Counter


class Credits(_LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: these landing slots may be written, once each, by this leg."""

    slots: _Slots


class AbortLeg(_LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: stop; answer `Quiesced` when nothing of the leg can be emitted or is in flight."""

    reason: Reason


class QuiescedAck(_LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: `Quiesced` arrived, it need not be sent again."""


class Query(_LegMessage, frozen=True, kw_only=True):
    """Decode to prefill: how far is the leg? Answered by `LegStatus`."""


# ---- a leg, prefill -> decode ----


class Chunk(_LegMessage, frozen=True, kw_only=True):
    """Prefill to decode, before the first segment of a chunk: what the chunk holds. Both sides plan it alike."""

    chunk: _Index
    ranges: _Ranges
    layers: LayerRange | None
    num_segments: Counter
    num_bytes: Counter


class Want(_LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: so many segments (counted over the leg's life) hold a sender slot; credit that many."""

    num_leased: Counter


class Segment(_LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: a segment's bytes are in the landing slot."""

    chunk: _Index
    segment: _Index
    slot: _SlotIndex
    num_bytes: Counter


class Finished(_LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: the last segment of the last chunk has been written."""

    num_chunks: Counter
    num_segments: Counter
    num_bytes: Counter
    aux: _Aux = b""


class LegFailed(_LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: the leg ends without success; `Quiesced` follows when it is quiet."""

    reason: Reason
    detail: _Text = ""


class Quiesced(_LegMessage, frozen=True, kw_only=True):
    """Prefill to decode: all that was emitted has ended, for ever. `unknown_slots` may still be written to."""

    unknown_slots: _Slots = ()


class LegStatus(_LegMessage, frozen=True, kw_only=True):
    """Prefill to decode, answer to `Query`. `state` is a `transfer.LegState` value, or `"unknown"`.

    `segments` are the (chunk, segment, slot, bytes) written so far, the newest at most.
    """

    state: Annotated[str, msgspec.Meta(max_length=32)]
    segments: Annotated[tuple[tuple[_Index, _Index, _SlotIndex, Counter], ...], msgspec.Meta(max_length=1 << 16)] = ()
    finished: Finished | None = None


WorkerRequest = AttachWorker | NewTicket | Submit | Open | AbortTransfer
WorkerReply = Attached | TicketMade | Ok | Refused
DecodeToPrefill = Hello | NewRegion | Ping | Goodbye | Grant | Credits | AbortLeg | QuiescedAck | Query
PrefillToDecode = (
    Welcome | NotReady | Refused | Ping | Goodbye | Chunk | Want | Segment | Finished | LegFailed | Quiesced | LegStatus
)
Message = WorkerRequest | WorkerReply | TransferEvent | DecodeToPrefill | PrefillToDecode
