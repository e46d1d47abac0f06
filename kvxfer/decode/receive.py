"""One transfer on the decode side: its pages, the legs that feed it, and what has landed of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvxfer.addresses import BlockAddresses, PageTable, check_pages
from kvxfer.control.messages import Finished, GroupPages, Open, Source, TransferStats
from kvxfer.control.pages import decode_pages
from kvxfer.coverage import Coverage
from kvxfer.errors import LayoutError
from kvxfer.layout import PoolLayout, TokenRange
from kvxfer.operations import CancelFlag, SegmentSource
from kvxfer.routes import Route
from kvxfer.transfer import RECEIVE_MOVES, Reason, ReceiveState

NO_PAGES = PageTable(TokenRange(0, 0), np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A paired prefill agent. `layout` is that of its pool where it is mapped here, so that rows can be pulled;
    otherwise `pull_trouble` says why it is not."""

    incarnation: str
    route: Route
    segment_bytes: int
    layout: PoolLayout | None = None
    pull_trouble: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RowsToPull:
    """Where rows lie in the source's pool, and the lease (word, value) under which they may be read."""

    addresses: tuple[BlockAddresses, ...]
    lease: tuple[int, int]


@dataclass(slots=True)
class ReceivedChunk:
    """A chunk that a leg announced. `has_come[i]` is 1 once segment `i` was taken over from its landing slot."""

    source: SegmentSource
    has_come: bytearray
    num_missing: int  # segments that have not come, or whose pull has not ended
    to_pull: RowsToPull | None = None  # until they are written, and the pull begins
    is_pulled: bool = False  # out of the source's pool, which waits for `Pulled`

    def holds(self, segment: int) -> bool:
        """Whether `segment` is one of the chunk's and was taken over."""
        return segment < len(self.has_come) and self.has_come[segment] == 1


@dataclass(slots=True, eq=False)
class ReceiveLeg:
    """One source of a transfer."""

    transfer: str
    generation: int
    source: Source
    source_idx: int
    info: SourceInfo | None = None  # set once paired
    wanted: tuple[TokenRange, ...] = ()  # per group of the route
    have: tuple[tuple[TokenRange, ...], ...] = ()
    owed_rows: int = 0
    is_granted: bool = False
    is_closed: bool = False  # nothing of it can reach a landing slot any more
    chunks: dict[int, ReceivedChunk] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)
    credits: dict[int, int] = field(
        default_factory=dict
    )  # landing slots that it may write right now, and their numbers
    num_wanted: int = 0  # segments that hold a sender slot, over the leg's life
    num_credited: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    num_segments: int = 0
    num_moves_to_come: int = 0  # scatters of announced segments and pulls of announced chunks, while it is open
    finished: Finished | None = None
    asked_at: float = 0.0  # when it was last heard, queried or told to stop

    @property
    def has_come(self) -> bool:
        """Whether everything that the source announced and counted has been taken over."""
        finished = self.finished
        return (
            finished is not None
            and len(self.chunks) == finished.num_chunks
            and all(chunk.num_missing == 0 for chunk in self.chunks.values())
        )


@dataclass(slots=True, eq=False)
class Receive:
    """A transfer from open to its terminal event, and on until every leg is closed."""

    transfer: str
    generation: int
    deadline: float
    opened_at: float
    tables: dict[str, PageTable]
    have: dict[str, tuple[TokenRange, ...]]
    legs: list[ReceiveLeg]
    num_decode_groups: int = 1
    state: ReceiveState = ReceiveState.OPEN
    cancel: CancelFlag = field(default_factory=CancelFlag)
    num_scattering: int = 0
    is_orphan: bool = False  # its worker is gone: nobody is told of its end
    reason: Reason | None = None
    detail: str = ""
    plan_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether its rows may still be put into pages."""
        return self.state in (ReceiveState.OPEN, ReceiveState.WAITING)

    @property
    def has_come(self) -> bool:
        """Whether every leg has finished and all its segments were taken over."""
        return all(leg.has_come for leg in self.legs)

    @property
    def has_ended(self) -> bool:
        return self.state in (ReceiveState.LANDED, ReceiveState.ENDED)

    def move(self, state: ReceiveState) -> None:
        """Take a step that the table of legal moves allows."""
        assert state in RECEIVE_MOVES[self.state], f"{self.transfer}: {self.state} -> {state} is no legal move"
        self.state = state

    def stats(self, now: float) -> TransferStats:
        """Sums over the legs."""
        return TransferStats(
            num_rows=sum(leg.num_rows for leg in self.legs),
            num_bytes=sum(leg.num_bytes for leg in self.legs),
            num_segments=sum(leg.num_segments for leg in self.legs),
            elapsed_s=now - self.opened_at,
            plan_s=self.plan_s,
            scatter_s=self.scatter_s,
        )


def check_free(opened: Receive, others: Iterable[Receive]) -> None:
    """Raise `LayoutError` where a page of `opened` belongs to a transfer that is open already."""
    for other in others:
        for name, table in opened.tables.items():
            held = other.tables.get(name, NO_PAGES)
            common = np.intersect1d(table.pages, held.pages)
            if common.size:
                raise LayoutError(
                    f"group {name!r}: pages: got page {int(common[0])}, which belongs to transfer {other.transfer} "
                    "until its terminal event"
                )


def accept_open(message: Open, layout: PoolLayout, generation: int, now: float) -> Receive:
    """Check an open against the pool. Raises `LayoutError`, naming group, got and expected."""
    by_name = {group.name: group for group in layout.groups}
    tables: dict[str, PageTable] = {}
    have: dict[str, tuple[TokenRange, ...]] = {}
    for entry in message.groups:
        group = by_name.get(entry.name)
        if group is None or entry.name in tables:
            raise LayoutError(f"groups: got {entry.name!r}, expected each of {sorted(by_name)} at most once")
        pages = decode_pages(entry.pages)
        check_pages(group, layout.shard, entry.tokens, pages)
        _check_have(entry)
        tables[entry.name] = PageTable(entry.tokens, pages)
        have[entry.name] = entry.have
    incarnations = [source.incarnation for source in message.ticket.sources]
    if len(set(incarnations)) != len(incarnations):
        raise LayoutError("ticket: sources: got one agent twice, expected each once")
    transfer = message.ticket.transfer
    legs = [ReceiveLeg(transfer, generation, source, idx) for idx, source in enumerate(message.ticket.sources)]
    num_decode_groups = message.ticket.num_decode_groups
    return Receive(transfer, generation, now + message.deadline_s, now, tables, have, legs, num_decode_groups)


def _check_have(entry: GroupPages) -> None:
    end = entry.tokens.first
    for held in entry.have:
        if held.first < end or held.end > entry.tokens.end:
            raise LayoutError(
                f"group {entry.name!r}: have: got [{held.first}, {held.end}), expected ascending, disjoint ranges "
                f"within [{entry.tokens.first}, {entry.tokens.end})"
            )
        end = held.end
