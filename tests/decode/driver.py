"""Drives a decode core by hand: the tiny pool of the prefill driver, sources by name, scatters ended by the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvxfer.control.ids import new_id
from kvxfer.control.messages import (
    AbortLeg,
    Chunk,
    Credits,
    Finished,
    Grant,
    LegFailed,
    LegStatus,
    Open,
    PrefillToDecode,
    Quiesced,
    Segment,
    Source,
    Ticket,
    TransferEvent,
    Want,
)
from kvxfer.control.pages import decode_pages, encode_pages
from kvxfer.decode.actions import Action, Notify, PairWith, Scatter, SendToPeer
from kvxfer.decode.core import DecodeCore
from kvxfer.decode.receive import ReceiveLeg, SourceInfo
from kvxfer.layout import LayerRange, PoolLayout, Shard, TokenRange
from kvxfer.routes import match_layouts
from kvxfer.segments import ChunkPlan
from kvxfer.slots import LANDING_MOVES, SlotState, SlotTable
from kvxfer.transfer import EventKind, Reason
from kvxfer.wire import plan_chunk
from tests.prefill.driver import NUM_PAGES, SEGMENT_BYTES, pages_for, pool_layout

_Message = TypeVar("_Message")


class DecodeDriver:
    """A core with its worker attached, rank `shard.rank` of a decode group. `now` stands until a test moves it."""

    def __init__(
        self, num_slots: int = 4, credits_per_leg: int = 4, shard: Shard | None = None, layout: PoolLayout | None = None
    ) -> None:
        self.now = 100.0
        self.layout = layout or pool_layout(shard)
        self.slots = SlotTable(num_slots, LANDING_MOVES)
        self.core = DecodeCore(self.slots, credits_per_leg)
        self.core.attach_worker(self.layout)
        self._page_shift = 0
        self.scatters: list[Scatter] = []  # emitted, not ended
        self.scattered: list[Scatter] = []  # ended after they had begun
        self.pairings: list[Source] = []
        self.sent: list[tuple[str, object]] = []
        self.events: list[TransferEvent] = []

    # ---- sources ----

    def pair(self, src_layout: PoolLayout | None = None, source: Source | None = None) -> Source:
        """A paired prefill agent with a pool like `src_layout`, unsharded by default."""
        source = source or Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id())
        shard = self.layout.shard
        route = match_layouts(src_layout or pool_layout(), self.layout, shard.rank, shard.size)
        self.core.peer_paired(SourceInfo(source.incarnation, route, SEGMENT_BYTES), self.now)
        self._take()
        return source

    def lose(self, source: Source) -> None:
        self.core.peer_gone(source.incarnation, Reason.PEER_LOST, "it is gone", self.now)
        self._take()

    def receive(self, source: Source, message: PrefillToDecode) -> None:
        self.core.receive(source.incarnation, message, self.now)
        self._take()

    def plan(self, source: Source, transfer: str, first: int, end: int, layers: LayerRange | None = None) -> ChunkPlan:
        """What the source plans for tokens `[first, end)`, from what it was granted."""
        grant = self.to(source, Grant, transfer)[-1]
        route = self.core.sources[source.incarnation].route
        return plan_chunk(route, (TokenRange(first, end),), grant.wanted, grant.have, layers, SEGMENT_BYTES)

    def chunk(
        self, source: Source, transfer: str, first: int, end: int, *, chunk: int = 0, layers: LayerRange | None = None
    ) -> int:
        """Announce a chunk and ask for credits for all its segments; returns their number."""
        plan = self.plan(source, transfer, first, end, layers)
        generation = self.generation(source, transfer)
        self.receive(
            source,
            Chunk(
                transfer=transfer,
                generation=generation,
                chunk=chunk,
                ranges=(TokenRange(first, end),),
                layers=layers,
                num_segments=plan.num_segments,
                num_bytes=plan.num_bytes,
            ),
        )
        leg = self.leg(source, transfer)
        num_leased = (leg.num_wanted if leg is not None else 0) + plan.num_segments
        self.receive(source, Want(transfer=transfer, generation=generation, num_leased=num_leased))
        return plan.num_segments

    def segment(
        self,
        source: Source,
        transfer: str,
        segment: int,
        slot: int,
        *,
        chunk: int = 0,
        num_bytes: int = SEGMENT_BYTES,
        generation: int | None = None,
    ) -> None:
        self.receive(
            source,
            Segment(
                transfer=transfer,
                generation=self.generation(source, transfer) if generation is None else generation,
                chunk=chunk,
                segment=segment,
                slot=slot,
                num_bytes=num_bytes,
            ),
        )

    def finished_message(
        self, source: Source, transfer: str, num_chunks: int, num_segments: int, num_bytes: int
    ) -> Finished:
        return Finished(
            transfer=transfer,
            generation=self.generation(source, transfer),
            num_chunks=num_chunks,
            num_segments=num_segments,
            num_bytes=num_bytes,
            aux=source.incarnation.encode(),
        )

    def quiesced(self, source: Source, transfer: str, *unknown_slots: int) -> None:
        generation = self.generation(source, transfer)
        self.receive(source, Quiesced(transfer=transfer, generation=generation, unknown_slots=unknown_slots))

    def leg_failed(self, source: Source, transfer: str, reason: Reason) -> None:
        self.receive(
            source, LegFailed(transfer=transfer, generation=self.generation(source, transfer), reason=reason, detail="")
        )

    def status(
        self,
        source: Source,
        transfer: str,
        state: str,
        segments: Sequence[tuple[int, int, int, int]] = (),
        finished: Finished | None = None,
    ) -> None:
        """`segments` are (chunk, segment, slot, bytes)."""
        generation = self.generation(source, transfer)
        notices = tuple(
            Segment(
                transfer=transfer, generation=generation, chunk=chunk, segment=segment, slot=slot, num_bytes=num_bytes
            )
            for chunk, segment, slot, num_bytes in segments
        )
        self.receive(
            source,
            LegStatus(transfer=transfer, generation=generation, state=state, segments=notices, finished=finished),
        )

    def deliver(self, source: Source, transfer: str, end: int) -> None:
        """The whole life of a leg that goes well: one chunk of `[0, end)`, every segment, `finished`."""
        plan = self.plan(source, transfer, 0, end)
        self.chunk(source, transfer, 0, end)
        for segment in range(plan.num_segments):
            first_byte, end_byte = plan.segment_range(segment)
            self.segment(source, transfer, segment, self.credits(source, transfer)[0], num_bytes=end_byte - first_byte)
            self.end_scatters()
        self.receive(source, self.finished_message(source, transfer, 1, plan.num_segments, plan.num_bytes))

    # ---- worker, executor, time ----

    def open(
        self,
        sources: tuple[Source, ...],
        end: int,
        *,
        first: int = 0,
        have: tuple[TokenRange, ...] = (),
        deadline_s: float = 60.0,
        transfer: str | None = None,
        same_pages: bool = False,
    ) -> str:
        """Open a transfer of tokens `[first, end)` into its own pages, or the last one's. Returns its id."""
        transfer = transfer or new_id()
        entry = pages_for(self.layout, first, end)
        pages = decode_pages(entry.pages)
        if not same_pages:
            self._page_shift += len(pages)
        pages = (pages + self._page_shift) % NUM_PAGES
        entry = msgspec.structs.replace(entry, pages=encode_pages(pages, "pages"), have=have)
        message = Open(ticket=Ticket(transfer=transfer, sources=sources), groups=(entry,), deadline_s=deadline_s)
        self.core.open(message, self.now)
        self._take()
        return transfer

    def abort(self, transfer: str) -> None:
        self.core.abort(transfer, self.now)
        self._take()

    def lose_worker(self) -> None:
        self.core.worker_lost(self.now)
        self._take()

    def end_scatter(self, error: str | None = None) -> None:
        """End the oldest scatter as the executor would: it begins unless its flag is set."""
        scatter = self.scatters.pop(0)
        if not scatter.cancel.is_set:
            self.scattered.append(scatter)
        self.core.scatter_ended(scatter.operation, self.now, 0.0, error)
        self._take()

    def end_scatters(self) -> None:
        while self.scatters:
            self.end_scatter()

    def tick(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.core.tick(self.now)
        self._take()

    # ---- what came out ----

    def to(self, source: Source, kind: type[_Message], transfer: str | None = None) -> list[_Message]:
        """Messages of one kind to one source."""
        return [
            message
            for name, message in self.sent
            if name == source.incarnation
            and isinstance(message, kind)
            and (transfer is None or getattr(message, "transfer", None) == transfer)
        ]

    def generation(self, source: Source, transfer: str) -> int:
        grants = self.to(source, Grant, transfer)
        return grants[-1].generation if grants else self.to(source, AbortLeg, transfer)[-1].generation

    def leg(self, source: Source, transfer: str) -> ReceiveLeg | None:
        receive = self.core.receives.get(transfer)
        legs = receive.legs if receive is not None else []
        return next((leg for leg in legs if leg.source.incarnation == source.incarnation), None)

    def credits(self, source: Source, transfer: str) -> list[int]:
        """Slots that the leg holds now."""
        leg = self.leg(source, transfer)
        return sorted(leg.credits) if leg is not None else []

    def num_credited(self, source: Source, transfer: str) -> int:
        """Over the leg's life."""
        return sum(len(message.slots) for message in self.to(source, Credits, transfer))

    def ends(self, transfer: str) -> list[tuple[EventKind, Reason | None]]:
        return [(event.event, event.reason) for event in self.events if event.transfer == transfer]

    def count(self, state: SlotState) -> int:
        return self.slots.count(state)

    def assert_idle(self) -> None:
        """Nothing runs, nothing is held, every slot is free."""
        assert not self.scatters
        assert self.slots.num_free == self.slots.num_slots
        assert not self.core.receives
        assert self.core.num_touching_pool == 0

    def _take(self) -> None:
        for action in self.core.take_actions():
            self._sort(action)

    def _sort(self, action: Action) -> None:
        match action:
            case Scatter():
                self.scatters.append(action)
            case PairWith():
                self.pairings.append(action.source)
            case SendToPeer():
                self.sent.append((action.peer, action.message))
            case Notify():
                self.events.append(action.event)
