"""Drives a prefill core by hand: a tiny pool, decode agents by name, and executors that end operations when told to.

The pool has one layer of one group, rows of `ROW_BYTES`, pages of `PAGE_TOKENS`; a segment holds `SEGMENT_ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from kvxfer.control.ids import new_id
from kvxfer.control.messages import (
    AbortLeg,
    Credits,
    DecodeToPrefill,
    Grant,
    GroupPages,
    PrefillToDecode,
    Submit,
    TransferEvent,
    Want,
)
from kvxfer.control.pages import encode_pages
from kvxfer.layout import Group, LayerRange, PoolLayout, Shard, TokenRange
from kvxfer.ownership import local_len, num_pages_of
from kvxfer.prefill.actions import Action, Gather, Notify, SendToPeer, Write
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.leg import Leg, Mode, PeerInfo
from kvxfer.routes import match_layouts
from kvxfer.slots import SENDER_MOVES, SlotState, SlotTable
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.base import Outcome

ROW_BYTES = 8
PAGE_TOKENS = 4
SEGMENT_ROWS = 4
SEGMENT_BYTES = ROW_BYTES * SEGMENT_ROWS
NUM_PAGES = 64

_Message = TypeVar("_Message")


def pool_layout(shard: Shard | None = None, *, layers: tuple[int, int] = (0, 1)) -> PoolLayout:
    """One group `kv`."""
    group = Group(
        name="kv",
        layers=LayerRange(*layers),
        layer_stride_bytes=NUM_PAGES * PAGE_TOKENS * ROW_BYTES,
        page_stride_bytes=PAGE_TOKENS * ROW_BYTES,
        num_pages=NUM_PAGES,
        page_tokens=PAGE_TOKENS,
        row_stride_bytes=ROW_BYTES,
        row_bytes=ROW_BYTES,
    )
    return PoolLayout(groups=(group,), shard=shard or Shard(), dtype_tag="bf16")


def pages_for(layout: PoolLayout, first: int, end: int) -> GroupPages:
    """Page ids of a range: local page `i` is page `NUM_PAGES - 1 - i`, so a chunk's follow from its tokens alone."""
    tokens = TokenRange(first, end)
    num_pages = num_pages_of(layout.shard, PAGE_TOKENS, tokens)
    first_page = local_len(layout.shard, first) // PAGE_TOKENS
    return GroupPages(
        name="kv", tokens=tokens, pages=encode_pages(NUM_PAGES - 1 - first_page - np.arange(num_pages), "pages")
    )


class PrefillDriver:
    """A core with its worker attached. What it asked for is sorted into lists; `now` stands until a test moves it."""

    def __init__(self, num_slots: int = 4, mode: Mode = Mode.PACKED, layout: PoolLayout | None = None) -> None:
        self.now = 100.0
        self.layout = layout or pool_layout()
        self.slots = SlotTable(num_slots, SENDER_MOVES)
        self.core = PrefillCore(self.slots, mode)
        self.core.attach_worker(self.layout)
        self.gathers: list[Gather] = []  # emitted, not ended
        self.writes: list[Write] = []
        self.sent: list[tuple[str, PrefillToDecode]] = []
        self.events: list[TransferEvent] = []
        self.actions: list[Action] = []  # every one, in order

    # ---- peers ----

    def pair(self, shard: Shard | None = None, *, rank: int = 0, world: int = 1) -> str:
        """A new decode agent; returns its incarnation."""
        incarnation = new_id()
        route = match_layouts(self.layout, pool_layout(shard), rank, world)
        self.core.peer_paired(PeerInfo(incarnation, route, SEGMENT_BYTES, world, dst_rank=rank, host="10.0.0.7"))
        return incarnation

    def receive(self, peer: str, message: DecodeToPrefill) -> None:
        self.core.receive(peer, message, self.now)
        self._take()

    def grant(
        self,
        peer: str,
        transfer: str,
        end: int,
        *,
        generation: int = 1,
        have: tuple[TokenRange, ...] = (),
        home: bool = True,
        remaining_s: float = 60.0,
        floor: int = 0,
        num_decode_groups: int = 1,
    ) -> None:
        """The peer wants tokens `[0, end)`."""
        message = Grant(
            transfer=transfer,
            generation=generation,
            home=home,
            wanted=(TokenRange(0, end),),
            have=(have,),
            remaining_s=remaining_s,
            floor=floor,
            num_decode_groups=num_decode_groups,
        )
        self.receive(peer, message)

    def credit(self, peer: str, transfer: str, *slots: int, generation: int = 1) -> None:
        leg = self.core.peers[peer].legs.get((transfer, generation))
        first = leg.num_credited if leg is not None else 0
        message = Credits(transfer=transfer, generation=generation, region_id=0, first=first, slots=slots)
        self.receive(peer, message)

    def abort_leg(self, peer: str, transfer: str, generation: int = 1) -> None:
        message = AbortLeg(transfer=transfer, generation=generation, reason=Reason.ABORTED_BY_WORKER)
        self.receive(peer, message)

    def lose(self, peer: str) -> None:
        self.core.peer_gone(peer, Reason.PEER_LOST, self.now)
        self._take()

    # ---- worker ----

    def ticket(self, deadline_s: float = 60.0, num_decode_groups: int = 1) -> str:
        transfer = new_id()
        self.core.new_ticket(transfer, deadline_s, self.now, num_decode_groups)
        return transfer

    def submit(
        self,
        transfer: str,
        first: int,
        end: int,
        *,
        last: bool = True,
        layers: LayerRange | None = None,
        groups: tuple[GroupPages, ...] | None = None,
        aux: bytes = b"",
        ready: int = 0,
        deadline_s: float = 60.0,
    ) -> None:
        groups = (pages_for(self.layout, first, end),) if groups is None else groups
        message = Submit(
            transfer=transfer, groups=groups, layers=layers, last=last, aux=aux, deadline_s=deadline_s, ready=ready
        )
        self.core.submit(message, self.now)
        self._take()

    def reach(self, value: int) -> None:
        """The worker's timeline has come so far."""
        self.core.timeline_reached(value, self.now)
        self._take()

    def abort(self, transfer: str) -> None:
        self.core.abort(transfer, self.now)
        self._take()

    def lose_worker(self) -> None:
        self.core.worker_lost(self.now)
        self._take()

    # ---- executors and time ----

    def end_gather(self, gather: Gather | None = None, *, error: str | None = None) -> None:
        """End one gather, the oldest by default, as the executor would: it begins unless its flag is set."""
        gather = gather or self.gathers[0]
        self.gathers.remove(gather)
        self.core.gather_ended(gather.operation, self.now, 0.0, error, was_begun=not gather.cancel.is_set)
        self._take()

    def end_gathers(self) -> None:
        while self.gathers:
            self.end_gather()

    def end_write(self, write: Write | None = None, outcome: Outcome = Outcome.DONE) -> None:
        write = write or self.writes[0]
        self.writes.remove(write)
        self.core.write_ended(write.operation, outcome, "as the test says", self.now)
        self._take()

    def tick(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.core.tick(self.now)
        self._take()

    def run(self, peers: Iterable[str], transfer: str, *, next_slot: int = 0) -> None:
        """End whatever is emitted, credit whatever is wanted, until nothing moves any more."""
        num_credited = dict.fromkeys(peers, 0)
        while True:
            self.end_gathers()
            for peer in num_credited:
                wanted = max((want.num_leased for want in self.to(peer, Want)), default=0)
                while num_credited[peer] < wanted:
                    self.credit(peer, transfer, next_slot % 64)
                    num_credited[peer], next_slot = num_credited[peer] + 1, next_slot + 1
            if not self.writes:
                return
            while self.writes:
                self.end_write()

    # ---- what came out ----

    def to(self, peer: str, kind: type[_Message]) -> list[_Message]:
        """Messages of one kind to one peer."""
        return [message for name, message in self.sent if name == peer and isinstance(message, kind)]

    def ends(self, transfer: str) -> list[tuple[EventKind, Reason | None]]:
        """Terminal events with their reasons."""
        ends = [event for event in self.events if event.transfer == transfer]
        return [(event.event, event.reason) for event in ends if event.event is not EventKind.SOURCE_FREE]

    def kinds(self, transfer: str) -> list[EventKind]:
        return [event.event for event in self.events if event.transfer == transfer]

    def leg(self, peer: str, transfer: str, generation: int = 1) -> Leg:
        return self.core.peers[peer].legs[(transfer, generation)]

    def count(self, state: SlotState) -> int:
        return self.slots.count(state)

    def assert_idle(self) -> None:
        """Nothing runs, nothing is held, every slot is free."""
        assert not self.gathers
        assert not self.writes
        assert self.slots.num_free == self.slots.num_slots
        assert not self.core.transfers
        assert self.core.num_reading_pool == 0

    def _take(self) -> None:
        while actions := self.core.take_actions():
            for action in actions:
                self._note(action)

    def _note(self, action: Action) -> None:
        self.actions.append(action)
        match action:
            case Gather():
                self.gathers.append(action)
            case Write():
                self.writes.append(action)
            case SendToPeer():
                self.sent.append((action.peer, action.message))
            case Notify():
                self.events.append(action.event)
