"""One leg on the prefill side: what it owes, what is packed, what is in flight."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvxfer.addresses import PageTable
from kvxfer.control.messages import Finished, Grant, LegStatus, PathFigures, PullReady, Segment
from kvxfer.operations import CancelFlag, SegmentSource
from kvxfer.routes import Route
from kvxfer.segments import ChunkPlan
from kvxfer.transfer import LEG_MOVES, LegState


class Mode(enum.Enum):
    """How rows get into landing slots."""

    PACKED = "packed"  # gather into a slot, write the slot
    P2P = "p2p"  # the peer pulls rows out of this pool itself
    AUTO = "auto"  # the fastest of these three, leg by leg
    RAW = "raw"  # one descriptor a source run, straight from the pool
    SERIAL = "serial"  # pack a whole chunk, then send it: the yardstick that public systems set


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A paired decode agent."""

    incarnation: str
    route: Route
    segment_bytes: int
    dst_world: int
    figures: PathFigures = field(default_factory=PathFigures)
    verify: bool = False  # it wants a checksum with every segment
    region_id: int = 0  # where its landing slots lay when it was paired
    dst_rank: int = 0
    host: str = ""

    def __str__(self) -> str:
        at = f" at {self.host}" if self.host else ""
        return f"decode agent {self.incarnation}{at} (dst_rank {self.dst_rank} of {self.dst_world})"


class Leases(Protocol):
    """Words in memory that peers read: `control.pull_share.LeaseTable`."""

    def take(self) -> tuple[int, int] | None:
        """A word and its value; None when all are in use."""
        ...

    def revoke(self, word: int) -> None:
        """Make what is pulled under the word from now on void."""
        ...


@dataclass(slots=True)
class ChunkWork:
    """One chunk of one leg. Segments `[0, next_segment)` hold or held a slot, the others wait."""

    chunk: int
    source: SegmentSource
    next_segment: int = 0

    @property
    def num_waiting(self) -> int:
        return self.source.plan.num_segments - self.next_segment


@dataclass(frozen=True, slots=True)
class UnreadyChunk:
    """A planned chunk whose rows may not be read before the worker's timeline has reached `ready`: segments to be sent,
    or the word that lets the peer, which knows where they lie, pull them."""

    ready: int
    what: ChunkWork | PullReady


@dataclass(slots=True)
class Lease:
    """A sender slot and the legs that send it: several when decode agents hold the same shard.

    `legs` are those whose write has not ended. The slot is freed, or quarantined, when none is left.
    """

    slot: int
    legs: list[Leg]
    unknown_peer: str | None = None


class Packed(msgspec.Struct, frozen=True, eq=False):
    """A segment that waits for a credit. `lease` is None in mode raw: its rows still lie in the pool."""

    work: ChunkWork
    segment: int
    lease: Lease | None
    digest: bytes = b""  # of the packed bytes, where a peer wants it


@dataclass(slots=True, eq=False)
class Sharing:
    """Legs of one transfer that send the same rows: one gather serves all that need the same segment at the time."""

    legs: list[Leg] = field(default_factory=list)
    num_to_gather: int = 0  # as `count()` last said

    def count(self) -> int:
        """Segments that are planned, have no sender slot and are to be packed, each counted once: of each chunk as many
        as the leg that is least far needs."""
        if len(self.legs) == 1:
            return self.legs[0].num_to_gather
        most: dict[int, int] = {}
        for leg in self.legs:
            for chunk, num_segments in leg.segments_to_gather().items():
                most[chunk] = max(most.get(chunk, 0), num_segments)
        return sum(most.values())


@dataclass(slots=True, eq=False)
class Leg:
    """State of one leg. Counters run over its whole life."""

    transfer: str
    peer: PeerInfo
    grant: Grant
    deadline: float
    mode: Mode
    state: LegState = LegState.GRANTED
    cancel: CancelFlag = field(default_factory=CancelFlag)
    unready: list[UnreadyChunk] = field(default_factory=list)
    works: deque[ChunkWork] = field(default_factory=deque)  # with segments that hold no slot yet
    num_unpacked: int = 0  # segments, in `works` and `unready`, that are still to be packed
    packed: deque[Packed] = field(default_factory=deque)
    credits: deque[int] = field(default_factory=deque)
    written: list[Segment] = field(default_factory=list)  # notices of what arrived
    unknown_slots: list[int] = field(default_factory=list)  # landing slots that a write may still reach
    finished: Finished | None = None
    num_chunks: int = 0
    num_rows: int = 0
    num_segments: int = 0  # planned
    num_bytes: int = 0  # planned
    num_runs: int = 0
    num_leased: int = 0
    num_in_a_row: int = 0  # of these, since the others had their turn
    num_wanted_sent: int = 0
    num_credited: int = 0  # landing slots that the peer has lent: at most as many as it was told are wanted
    num_filling: int = 0
    num_held: int = 0  # sender slots, or raw segments, between lease and end of write
    num_emitted: int = 0
    num_ended: int = 0
    sharing: Sharing = field(default_factory=Sharing)  # those that send the same rows, this one among them
    lease: tuple[int, int] | None = None  # word and value under which the peer may pull
    uncounted: dict[int, tuple[ChunkPlan, tuple[PageTable, ...]]] = field(default_factory=dict)
    """Chunks that the peer pulls and whose runs are counted when it has: nobody waits for them then."""
    pulling: set[int] = field(default_factory=set)  # chunks that the peer was told to pull and has not reported
    is_sending: bool = False  # mode serial: the packed segments go out, nothing more is packed
    quiesced_sent_at: float = 0.0
    quiesced_acked: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.transfer, self.grant.generation

    @property
    def can_pull(self) -> bool:
        """Whether the peer may pull rows itself."""
        return self.grant.can_pull and self.lease is not None

    @property
    def reads_pool(self) -> bool:
        """Whether rows of the pool are still to be read, by this agent, its engine or the peer."""
        is_raw = self.mode is Mode.RAW
        return bool(self.unready or self.works or self.num_filling or self.pulling or (is_raw and self.num_held))

    @property
    def is_live(self) -> bool:
        return self.state not in (LegState.FINISHED, LegState.QUIET)

    @property
    def num_to_gather(self) -> int:
        """Segments that are planned and still to be packed."""
        return 0 if self.mode is Mode.RAW else self.num_unpacked

    def segments_to_gather(self) -> dict[int, int]:
        """By chunk, the segments that are still to be packed: `num_to_gather` in all."""
        if not self.num_to_gather:
            return {}
        works = [*self.works, *(each.what for each in self.unready if isinstance(each.what, ChunkWork))]
        return {work.chunk: work.num_waiting for work in works}

    def status(self) -> LegStatus:
        """How far the leg is, with the newest of what was written."""
        return LegStatus(
            transfer=self.transfer,
            generation=self.grant.generation,
            state=self.state.value,
            num_credited=self.num_credited,
            segments=tuple(self.written[-4096:]),
            finished=self.finished,
        )

    def move(self, state: LegState) -> None:
        """Take a step that the table of legal moves allows."""
        assert state in LEG_MOVES[self.state], f"leg {self.key}: {self.state} -> {state} is no legal move"
        self.state = state

    def sends_alike(self, other: Leg) -> bool:
        """Whether both legs put the same rows into the same segments, so that one gather serves both."""
        return (
            self.peer.route == other.peer.route
            and self.peer.segment_bytes == other.peer.segment_bytes
            and self.grant.wanted == other.grant.wanted
            and self.grant.have == other.grant.have
        )
