"""One transfer on the prefill side: what the worker has submitted, and the legs that it feeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from kvxfer.addresses import PageTable, check_pages, group_shard
from kvxfer.control.messages import Submit, TransferStats
from kvxfer.control.pages import decode_pages
from kvxfer.coverage import Coverage
from kvxfer.errors import LayoutError
from kvxfer.layout import Group, LayerRange, PoolLayout, TokenRange
from kvxfer.ownership import Int64Array, local_len
from kvxfer.prefill.leg import Leg
from kvxfer.transfer import Reason

NO_PAGES = PageTable(TokenRange(0, 0), np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class SubmittedChunk:
    """A chunk as the worker submitted it, checked. Tables are by group name; an absent group has no rows in it."""

    chunk: int
    tables: dict[str, PageTable]
    layers: LayerRange | None
    ready: int = 0  # of the worker's timeline: its rows are written by then


class TransferPages:
    """Which page holds which of the transfer's rows, over all its chunks, so that no page is named twice."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Int64Array, Int64Array]] = {}  # by group: local pages, ascending, and their ids

    def merged(self, group: Group, first_page: int, pages: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The group's local pages, ascending, and their ids, with `pages` from local page `first_page` on. Nothing is
        kept yet. Raises `LayoutError` where a local page would change its id, or an id would serve two local pages.
        """
        none = np.empty(0, dtype=np.int64)
        known_local, known_ids = self._known.get(group.name, (none, none))
        first, end = np.searchsorted(known_local, (first_page, first_page + pages.size))
        named_again = known_local[first:end] - first_page
        changed = np.flatnonzero(pages[named_again] != known_ids[first:end])
        where = f"group {group.name!r}: pages"
        if changed.size:
            idx = int(named_again[changed[0]])
            raise LayoutError(
                f"{where}: got page {int(pages[idx])} for local page {first_page + idx}, "
                f"expected {int(known_ids[first + changed[0]])}, which an earlier chunk named"
            )
        local = np.arange(first_page, first_page + pages.size, dtype=np.int64)
        local = np.concatenate((known_local[:first], local, known_local[end:]))
        ids = np.concatenate((known_ids[:first], pages, known_ids[end:]))
        ordered = np.sort(ids)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if twice.size:
            page = int(ordered[twice[0]])
            raise LayoutError(f"{where}: got page {page} twice in one transfer, expected each page once")
        return local, ids

    def keep(self, name: str, merged: tuple[Int64Array, Int64Array]) -> None:
        """Keep what `merged` returned."""
        self._known[name] = merged


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer from ticket or first grant to its terminal event."""

    transfer: str
    is_known: bool  # the worker made its ticket here or has submitted to it
    started_at: float
    deadline: float
    num_decode_groups: int = 1
    chunks: list[SubmittedChunk] = field(default_factory=list)
    pages: TransferPages = field(default_factory=TransferPages)
    coverage: Coverage = field(default_factory=Coverage)
    legs: dict[str, Leg] = field(default_factory=dict)  # by decode agent
    has_all_legs: bool = False  # every agent of every decode group has sent its grant
    has_last: bool = False
    aux: bytes = b""
    reason: Reason | None = None
    detail: str = ""
    is_source_free: bool = False
    has_ended: bool = False
    ended_at: float = 0.0
    plan_s: float = 0.0
    pack_s: float = 0.0
    send_s: float = 0.0
    num_descriptors: int = 0

    def add_leg(self, leg: Leg) -> None:
        """A decode agent has sent its grant. A group of `n` agents is whole when each brought its `n`-th part."""
        self.num_decode_groups = leg.grant.num_decode_groups
        leg.sharing = next((each.sharing for each in self.legs.values() if each.sends_alike(leg)), leg.sharing)
        leg.sharing.legs.append(leg)
        self.legs[leg.peer.incarnation] = leg
        parts = sum(Fraction(1, each.peer.dst_world) for each in self.legs.values())
        self.has_all_legs = parts == self.num_decode_groups

    @property
    def what_is_missing(self) -> str:
        """What others still owe, in words; empty where all have asked and the worker has submitted its last chunk."""
        problems = []
        if not self.has_all_legs:
            asked = Counter(leg.peer.dst_world for leg in self.legs.values())
            num_whole = sum(num_agents // world for world, num_agents in asked.items())
            problems.append(f"{num_whole} of {self.num_decode_groups} decode groups have opened it")
            problems += [
                f"{num % world} of the {world} agents of one more" for world, num in asked.items() if num % world
            ]
        if not self.has_last:
            problems.append("its last chunk was not submitted")
        return ", ".join(problems)

    def stats(self, now: float) -> TransferStats:
        """Sums over the legs."""
        legs = self.legs.values()
        return TransferStats(
            num_rows=sum(leg.num_rows for leg in legs),
            num_bytes=sum(leg.num_bytes for leg in legs),
            num_segments=sum(leg.num_segments for leg in legs),
            num_descriptors=self.num_descriptors,
            num_runs=sum(leg.num_runs for leg in legs),
            elapsed_s=now - self.started_at,
            plan_s=self.plan_s,
            pack_s=self.pack_s,
            send_s=self.send_s,
        )

    def accept(self, submit: Submit, layout: PoolLayout) -> SubmittedChunk:
        """Check a submit against the pool and what came before, then keep it.

        Raises `LayoutError` and keeps nothing where it does not fit.
        """
        if self.has_last:
            raise LayoutError("submit: got a chunk after the one marked last, expected none")
        if not submit.groups and not submit.last:
            raise LayoutError("groups: got none, expected at least one in a chunk that is not marked last")
        if submit.layers is not None:
            _check_layers(submit.layers, layout)
        by_name = {group.name: group for group in layout.groups}
        tables: dict[str, PageTable] = {}
        merged: dict[str, tuple[Int64Array, Int64Array]] = {}
        rectangles = []
        for entry in submit.groups:
            group = by_name.get(entry.name)
            if group is None or entry.name in tables:
                raise LayoutError(f"groups: got {entry.name!r}, expected each of {sorted(by_name)} at most once")
            pages = decode_pages(entry.pages)
            check_pages(group, layout.shard, entry.tokens, pages)
            first_row = local_len(group_shard(group, layout.shard), entry.tokens.first)
            merged[entry.name] = self.pages.merged(group, first_row // group.page_tokens, pages)
            tables[entry.name] = PageTable(entry.tokens, pages)
            rectangles.append((layout.groups.index(group), _chunk_layers(group, submit.layers), entry.tokens))
        self.coverage.add(rectangles)
        for name, pages_of_group in merged.items():
            self.pages.keep(name, pages_of_group)
        chunk = SubmittedChunk(len(self.chunks), tables, submit.layers, submit.ready)
        self.chunks.append(chunk)
        self.has_last = submit.last
        self.aux = submit.aux or self.aux
        return chunk


def _chunk_layers(group: Group, layers: LayerRange | None) -> LayerRange:
    return group.layers if layers is None else group.layers.intersect(layers)


def _check_layers(layers: LayerRange, layout: PoolLayout) -> None:
    """Raise `LayoutError` where no group of the pool holds some of `layers`. One group need not hold all of them."""
    held = sorted((group.layers for group in layout.groups), key=lambda each: each.first)
    end = layers.first  # [layers.first, end) is held
    for each in held:
        if each.first <= end:
            end = max(end, each.end)
    if end < layers.end:
        ranges = ", ".join(sorted({f"[{each.first}, {each.end})" for each in held}))
        raise LayoutError(
            f"layers: got [{layers.first}, {layers.end}), expected none but those of this pool's groups: {ranges}"
        )
