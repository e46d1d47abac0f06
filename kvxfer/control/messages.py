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

from kvxfer.control.leg_messages import (
    AbortLeg,
    Chunk,
    Credits,
    Finished,
    Grant,
    LegFailed,
    LegStatus,
    PullChunk,
    Pulled,
    PullReady,
    Query,
    Quiesced,
    QuiescedAck,
    Segment,
    Want,
)
from kvxfer.control.message_base import (
    MAX_AUX_BYTES,
    MAX_METADATA_BYTES,
    MAX_PAGES,
    MAX_SOURCES,
    PROTOCOL_VERSION,
    Aux,
    Counter,
    Endpoint,
    EngineMetadata,
    HaveRanges,
    Id,
    Index,
    Measure,
    MessageBase,
    NumDecodeGroups,
    PageBytes,
    Seconds,
    Text,
    TimelineValue,
)
from kvxfer.control.stream_messages import PeerPoolMapped, PeerPoolUnmapped, SlotsMapped
from kvxfer.layout import MAX_GROUPS, LayerRange, PoolLayout, TokenRange
from kvxfer.transfer import EventKind, Reason

__all__ = [
    "MAX_AUX_BYTES",
    "MAX_METADATA_BYTES",
    "MAX_PAGES",
    "MAX_SOURCES",
    "PROTOCOL_VERSION",
    "AbortLeg",
    "AbortTransfer",
    "AttachWorker",
    "Attached",
    "Chunk",
    "Counter",
    "Credits",
    "DecodeToPrefill",
    "Finished",
    "Goodbye",
    "Grant",
    "GroupPages",
    "Hello",
    "Id",
    "LegFailed",
    "LegStatus",
    "Message",
    "MessageBase",
    "NewRegion",
    "NewTicket",
    "Ok",
    "Open",
    "PageBytes",
    "PathFigures",
    "PeerPoolMapped",
    "PeerPoolUnmapped",
    "Ping",
    "PrefillToDecode",
    "PullChunk",
    "PullReady",
    "Pulled",
    "Query",
    "Quiesced",
    "QuiescedAck",
    "Refused",
    "RegionTaken",
    "RejectTicket",
    "Segment",
    "SlotsMapped",
    "Source",
    "StreamWord",
    "Submit",
    "Ticket",
    "TicketMade",
    "TransferEvent",
    "TransferStats",
    "Want",
    "Welcome",
    "WorkerReply",
    "WorkerRequest",
]

# ---- ticket: from the prefill side through any router to the decode side ----


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One prefill agent as decode agents reach it. `key` is its CURVE public key, empty without CURVE."""

    endpoint: Endpoint
    incarnation: Id
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names one transfer and every prefill agent that feeds it; the first source made the id and knows it.

    `num_decode_groups` decode groups receive it, each in full.
    """

    transfer: Id
    sources: Annotated[tuple[Source, ...], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]
    num_decode_groups: NumDecodeGroups = 1


# ---- worker <-> agent, over ipc ----


class AttachWorker(MessageBase, frozen=True, kw_only=True):
    """Worker to agent, first message: the pool that was handed off as `pool` is this connection's."""

    pool: Id


class Attached(MessageBase, frozen=True, kw_only=True):
    """Agent to worker: ready. `source` is set on the prefill side."""

    incarnation: Id
    source: Source | None = None


class NewTicket(MessageBase, frozen=True, kw_only=True):
    """Prefill worker to agent: make a ticket for `num_decode_groups` decode groups. `sources` are the other agents of
    the same prefill worker group."""

    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=MAX_SOURCES - 1)] = ()
    num_decode_groups: NumDecodeGroups = 1
    deadline_s: Seconds


class TicketMade(MessageBase, frozen=True, kw_only=True):
    """Agent to prefill worker."""

    ticket: Ticket


class GroupPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pages of one group: they hold the local rows of `tokens`, in order. `name` as in the layout."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    tokens: TokenRange
    pages: PageBytes = b""
    have: HaveRanges = ()
    """Decode side only: parts of `tokens` whose rows are already in the pages and need not be sent."""


_GroupPages = Annotated[tuple[GroupPages, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class Submit(MessageBase, frozen=True, kw_only=True):
    """Prefill worker to agent: the KV of one chunk is complete in its pages once the timeline has reached `ready`. A
    group that is absent has no rows in this chunk. `layers` restricts it to some layers. `last` ends the transfer's
    chunks."""

    transfer: Id
    groups: _GroupPages
    layers: LayerRange | None = None
    last: bool = False
    aux: Aux = b""
    deadline_s: Seconds
    ready: TimelineValue = 0


class Open(MessageBase, frozen=True, kw_only=True):
    """Decode worker to agent: receive the transfer into these pages."""

    ticket: Ticket
    groups: _GroupPages
    deadline_s: Seconds


class RejectTicket(MessageBase, frozen=True, kw_only=True):
    """Decode worker to agent: this side will never open the ticket; its sources need not wait."""

    ticket: Ticket


class AbortTransfer(MessageBase, frozen=True, kw_only=True):
    """Worker to agent: end the transfer as soon as its pages are quiet."""

    transfer: Id


class Ok(MessageBase, frozen=True, kw_only=True):
    """Agent to worker: accepted."""


class Refused(MessageBase, frozen=True, kw_only=True):
    """Agent to worker, or agent to agent: nothing was changed. `field`, `got` and `expected` where one is to blame."""

    reason: Reason | None = None
    detail: Text
    field: Text = ""


class TransferStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one side of a transfer did. Times are sums over segments on the agent's clock, in seconds.

    `num_descriptors` were handed to the engine; `num_runs` is what a per-token sender would have handed to it.
    """

    num_rows: Counter = 0
    num_bytes: Counter = 0
    num_segments: Counter = 0
    num_descriptors: Counter = 0
    num_runs: Counter = 0
    elapsed_s: Measure = 0.0
    plan_s: Measure = 0.0
    pack_s: Measure = 0.0
    send_s: Measure = 0.0
    scatter_s: Measure = 0.0


class TransferEvent(MessageBase, frozen=True, kw_only=True):
    """Agent to worker. When a terminal event arrives, no action of the agent touches the transfer's pages any more.

    `aux` has the bytes that each source attached, in the ticket's order (`landed` only).
    """

    transfer: Id
    event: EventKind
    reason: Reason | None = None
    detail: Text = ""
    aux: Annotated[tuple[Aux, ...], msgspec.Meta(max_length=MAX_SOURCES)] = ()
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
    dst_rank: Index
    dst_world: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    transport: Annotated[str, msgspec.Meta(max_length=32)]
    metadata: EngineMetadata
    region_id: Counter
    region_bytes: Counter
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    probe_offset_bytes: Counter
    probe_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    verify: bool = False
    """Every packed segment must come with its checksum."""


class NewRegion(MessageBase, frozen=True, kw_only=True):
    """Decode to prefill: the landing slots have moved to another region. Said again until `RegionTaken` comes; credits
    of a region that the prefill agent does not know are not used."""

    metadata: EngineMetadata
    region_id: Counter
    region_bytes: Counter


class RegionTaken(MessageBase, frozen=True, kw_only=True):
    """Prefill to decode: `NewRegion` has arrived; this side writes to that region from now on."""

    region_id: Counter


class PathFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the wire to one peer did when it was measured."""

    path: Annotated[str, msgspec.Meta(max_length=200)] = "unknown"
    descriptor_s: Measure = 0.0
    bytes_per_s: Measure = 0.0


class Welcome(MessageBase, frozen=True, kw_only=True):
    """Prefill to decode: paired. `segment_bytes` is the segment limit of this pair: the smaller slot of the two."""

    version: Counter = PROTOCOL_VERSION
    incarnation: Id
    pool: Id
    layout: PoolLayout
    segment_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    figures: PathFigures
    pull_path: Annotated[str, msgspec.Meta(max_length=107)] = ""
    """Unix socket where agents of the same host get this pool read-only; empty where it is not offered."""


class Goodbye(MessageBase, frozen=True, kw_only=True):
    """Either agent: this run ends; every leg with it is over."""

    incarnation: Id


class Ping(MessageBase, frozen=True, kw_only=True):
    """Decode to prefill, again and again: `floor` is the lowest generation that is still live."""

    incarnation: Id
    floor: Counter = 0


StreamWord = SlotsMapped | PeerPoolMapped | PeerPoolUnmapped
WorkerRequest = AttachWorker | NewTicket | Submit | Open | RejectTicket | AbortTransfer | StreamWord
WorkerReply = Attached | TicketMade | Ok | Refused
DecodeToPrefill = Hello | NewRegion | Ping | Goodbye | Grant | Credits | AbortLeg | QuiescedAck | Query | Pulled
PrefillToDecode = (
    Welcome
    | Refused
    | RegionTaken
    | Goodbye
    | Chunk
    | PullChunk
    | PullReady
    | Want
    | Segment
    | Finished
    | LegFailed
    | Quiesced
    | LegStatus
)
Message = WorkerRequest | WorkerReply | TransferEvent | DecodeToPrefill | PrefillToDecode
