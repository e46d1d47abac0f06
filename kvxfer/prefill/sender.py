"""Slots, credits and turns of the sending side: which segment is packed next, and which packed one may go.

A leg asks for credits only for segments that hold a slot, so a credited landing slot is always written: slots and
credits cannot wait for each other in a circle. Legs take turns, and none may hold all slots while others wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec
import numpy as np

from kvxfer.addresses import runs
from kvxfer.control.messages import Segment, Want
from kvxfer.integrity import bind
from kvxfer.operations import SegmentSource
from kvxfer.prefill.actions import Action, Gather, Runs, SendToPeer, Write
from kvxfer.prefill.leg import ChunkWork, Lease, Leg, Mode, Packed
from kvxfer.prefill.serial import SerialGate
from kvxfer.slots import SlotState, SlotTable
from kvxfer.transfer import LegState
from kvxfer.transports.base import Outcome

_MAX_IN_A_ROW = 4
"""Segments that a leg may pack before it is another's turn; at most half of the slots. What its peer is told and
answers then travels several in a frame, and a frame costs as much as all else that a segment does."""


class _GatherOp(msgspec.Struct, frozen=True, eq=False):
    lease: Lease
    segment: int
    legs: tuple[Leg, ...]
    works: tuple[ChunkWork, ...]  # parallel to `legs`


class _WriteOp(msgspec.Struct, frozen=True, eq=False):
    leg: Leg
    lease: Lease | None
    notice: Segment
    num_descriptors: int
    emitted_at: float


class Sender:
    """Moves the segments of all legs through the sender slots."""

    def __init__(
        self,
        slots: SlotTable,
        outbox: list[Action],
        on_progress: Callable[[Leg, float, float, int], None],
        *,
        is_serial: bool,
    ) -> None:
        """`on_progress(leg, pack_s, send_s, num_descriptors)` hears of every operation that ended. Without `is_serial`
        no leg is in mode serial."""
        self.slots = slots
        self._outbox = outbox
        self._on_progress = on_progress
        self._turns: deque[Leg] = deque()  # legs with segments that hold no slot, the next one first
        self._gathers: dict[int, _GatherOp] = {}
        self._writes: dict[int, _WriteOp] = {}
        self._num_operations = 0
        self._max_in_a_row = max(1, min(_MAX_IN_A_ROW, slots.num_slots // 2))
        self._advanced: list[Leg] = []  # legs that leased since their peers were told
        self._num_held: Counter[str] = Counter()  # slots, or raw segments, by peer
        self.num_peers = 0
        self.num_to_gather = 0
        """Segments that are planned, have no slot and are to be packed. Those that legs share count once."""
        self._serial = SerialGate() if is_serial else None

    @property
    def num_reading_pool(self) -> int:
        """Operations that may read the worker's pool: gathers, and raw writes."""
        return len(self._gathers) + sum(1 for op in self._writes.values() if op.lease is None)

    def expect_work(self, leg: Leg, num_segments: int) -> None:
        """So many segments of the leg were planned; `add_work` follows, at once or when they may be read."""
        leg.num_unpacked += num_segments
        self._count_gathers(leg)

    def _count_gathers(self, leg: Leg) -> None:
        """What the leg, or one that it shares gathers with, has still to pack, or its mode, has changed."""
        sharing = leg.sharing
        num_gathers = sharing.count()
        self.num_to_gather += num_gathers - sharing.num_to_gather
        sharing.num_to_gather = num_gathers

    def add_work(self, leg: Leg, work: ChunkWork) -> None:
        """Queue a chunk of an active leg."""
        if work.num_waiting == 0:
            return
        leg.works.append(work)
        if leg not in self._turns:
            self._turns.append(leg)

    def credit(self, leg: Leg, dst_slots: tuple[int, ...], now: float) -> None:
        """The peer lends landing slots to an active leg."""
        leg.credits.extend(dst_slots)
        self.write_packed(leg, now)

    def pump(self, now: float) -> bool:
        """Emit every write that slots and credits allow, and one gather; whether there is another one."""
        if self._serial is not None:
            for leg in self._serial.waiting(self._turns):
                self.write_packed(leg, now)
        has_gather = False
        while (leg_next := self._next_leg()) is not None:
            if has_gather:
                return True
            has_gather = leg_next.mode is not Mode.RAW
            self._lease(leg_next, now)
        if self._advanced:
            self._send_wants()
        return False

    def write_packed(self, leg: Leg, now: float) -> None:
        """Emit a write for every packed segment of `leg` that has a credit."""
        if self._serial is not None and leg.mode is Mode.SERIAL:
            filling = (each for op in self._gathers.values() for each in op.legs)
            if not self._serial.may_send(leg, self._turns, filling, has_slot=self.slots.num_free > 0):
                return
        while leg.packed and leg.credits and leg.state is LegState.ACTIVE:
            self._write(leg, leg.packed.popleft(), leg.credits.popleft(), now)

    def is_verified(self, operation: int) -> bool:
        """Whether a peer of a gather wants checksums, which only packed bytes have."""
        return any(leg.peer.verify for leg in self._gathers[operation].legs)

    def gather_ended(
        self, operation: int, now: float, busy_s: float, *, was_done: bool, go_raw: bool = False, digest: bytes = b""
    ) -> tuple[Leg, ...]:
        """A gather has ended after `busy_s` of work, or was never begun or failed (`was_done` False). With `go_raw`
        its legs go on without packing, from this segment on. Returns the legs that took part."""
        op = self._gathers.pop(operation)
        lease = op.lease
        if was_done:
            self.slots.move(lease.slot, SlotState.READY)
        for leg, work in zip(op.legs, op.works, strict=True):
            leg.num_ended += 1
            leg.num_filling -= 1
            if was_done and leg.state is LegState.ACTIVE:
                leg.packed.append(Packed(work, op.segment, lease, digest))
                continue
            self._give_back(leg, lease)
            if go_raw and leg.state is LegState.ACTIVE:
                leg.mode = Mode.RAW
                self._count_gathers(leg)
                self._hold(leg)
                leg.packed.append(Packed(work, op.segment, None))
        self._on_progress(op.legs[0], busy_s, 0.0, 0)
        for leg in op.legs:
            self.write_packed(leg, now)
        return op.legs

    def write_ended(self, operation: int, outcome: Outcome, now: float) -> Leg:
        """A write has ended. Returns its leg; the caller judges the outcome."""
        op = self._writes.pop(operation)
        leg = op.leg
        leg.num_ended += 1
        notice = op.notice
        if outcome is Outcome.DONE:
            leg.written.append(notice)
        elif outcome is Outcome.UNKNOWN:
            leg.unknown_slots.append(notice.slot)
            if op.lease is not None:
                op.lease.unknown_peer = leg.peer.incarnation
        self._give_back(leg, op.lease)
        self._on_progress(leg, 0.0, now - op.emitted_at, op.num_descriptors)
        return leg

    def stop(self, leg: Leg) -> None:
        """Nothing of `leg` is emitted any more; what is packed and waits for a credit gives its slot back."""
        leg.cancel.is_set = True
        leg.works.clear()
        leg.num_unpacked = 0
        self._count_gathers(leg)
        if leg in self._turns:
            self._turns.remove(leg)
        while leg.packed:
            self._give_back(leg, leg.packed.popleft().lease)
        leg.credits.clear()

    def _next_leg(self) -> Leg | None:
        """The next leg, in turn, that may hold one more slot; None where there is none, or no slot is free."""
        has_slot = self.slots.next_free() is not None
        serial = self._serial
        for leg in self._turns:
            if (has_slot or leg.mode is Mode.RAW) and self._has_room(leg) and (serial is None or serial.may_pack(leg)):
                return leg
        return None

    def _has_room(self, leg: Leg) -> bool:
        """Whether the leg's peer, which may give no credits or have stopped, leaves enough for the others."""
        peer = leg.peer.incarnation
        num_used = self.slots.num_quarantined(peer) + self._num_held[peer]
        if leg.mode is Mode.RAW:
            return num_used < self.slots.share(self.num_peers)  # it needs no slot of this side
        # Mode serial fills all slots before it sends.
        return self.slots.has_room(0 if leg.mode is Mode.SERIAL else num_used, self.num_peers)

    def _lease(self, leg: Leg, now: float) -> None:
        """Give the leg's next segment a free slot and emit its gather; after a few it is the others' turn."""
        leg.num_in_a_row += 1
        if leg.num_in_a_row >= self._max_in_a_row:
            leg.num_in_a_row = 0
            self._turns.remove(leg)
            self._turns.append(leg)
        work = leg.works[0]
        segment = work.next_segment
        if leg.mode is Mode.RAW:
            self._advance(leg)
            leg.packed.append(Packed(work, segment, None))
            self.write_packed(leg, now)
            return
        slot = self.slots.take(SlotState.FILLING)
        assert slot is not None
        legs: tuple[Leg, ...] = (leg,)
        works: tuple[ChunkWork, ...] = (work,)
        wants_digest = leg.peer.verify
        if len(leg.sharing.legs) > 1:
            legs = (leg, *self._companions(leg, work, segment))
            works = tuple(each.works[0] for each in legs)
            wants_digest = any(each.peer.verify for each in legs)
        for each in legs:
            self._advance(each)
            each.num_filling += 1
            each.num_emitted += 1
        self._count_gathers(leg)
        self._num_operations += 1
        self._gathers[self._num_operations] = _GatherOp(Lease(slot, list(legs)), segment, legs, works)
        # A shared gather heeds one leg's flag: the legs of a transfer stop together.
        self._outbox.append(Gather(self._num_operations, slot, work.source, segment, leg.cancel, wants_digest))

    def _companions(self, leg: Leg, work: ChunkWork, segment: int) -> list[Leg]:
        """Legs of the same transfer that need the very same segment now: it is gathered once for all of them."""
        return [
            other
            for other in leg.sharing.legs
            if other is not leg
            and other.works  # it has its turn, too
            and other.mode is leg.mode
            and other.works[0].chunk == work.chunk
            and other.works[0].next_segment == segment
        ]

    def _advance(self, leg: Leg) -> None:
        work = leg.works[0]
        work.next_segment += 1
        leg.num_leased += 1
        leg.num_unpacked -= 1
        self._hold(leg)
        self._advanced.append(leg)
        if work.num_waiting == 0:
            leg.works.popleft()
        if not leg.works:
            self._turns.remove(leg)

    def _hold(self, leg: Leg) -> None:
        leg.num_held += 1
        self._num_held[leg.peer.incarnation] += 1

    def _write(self, leg: Leg, packed: Packed, dst_slot: int, now: float) -> None:
        first_byte, end_byte = packed.work.source.plan.segment_range(packed.segment)
        notice = Segment(
            transfer=leg.transfer,
            generation=leg.grant.generation,
            chunk=packed.work.chunk,
            segment=packed.segment,
            slot=dst_slot,
            num_bytes=end_byte - first_byte,
            checksum=_checksum(leg, packed) if leg.peer.verify else b"",
        )
        lease = packed.lease
        segment_runs = None if lease is not None else segment_as_runs(packed.work.source, packed.segment)
        if lease is not None and self.slots.state(lease.slot) is SlotState.READY:
            self.slots.move(lease.slot, SlotState.IN_FLIGHT)
        leg.num_emitted += 1
        self._num_operations += 1
        num_descriptors = 1 if segment_runs is None else len(segment_runs.lengths)
        self._writes[self._num_operations] = _WriteOp(leg, lease, notice, num_descriptors, now)
        src_slot = None if lease is None else lease.slot
        self._outbox.append(
            Write(self._num_operations, leg.peer.incarnation, notice, leg.cancel, src_slot, segment_runs)
        )

    def _give_back(self, leg: Leg, lease: Lease | None) -> None:
        """`leg` holds the segment no more. Its slot is free, or quarantined, when no other leg holds it."""
        leg.num_held -= 1
        self._num_held[leg.peer.incarnation] -= 1
        if lease is None:
            return
        lease.legs.remove(leg)
        if lease.legs:
            return
        if lease.unknown_peer is not None:
            self.slots.quarantine(lease.slot, lease.unknown_peer)
        else:
            self.slots.move(lease.slot, SlotState.FREE)

    def _send_wants(self) -> None:
        """Tell each peer how many segments hold a slot since it was told last."""
        advanced, self._advanced = self._advanced, []
        for leg in advanced:
            if leg.num_leased > leg.num_wanted_sent and leg.state is LegState.ACTIVE:
                leg.num_wanted_sent = leg.num_leased
                transfer, generation = leg.key
                want = Want(transfer=transfer, generation=generation, num_leased=leg.num_leased)
                self._outbox.append(SendToPeer(leg.peer.incarnation, want))


def _checksum(leg: Leg, packed: Packed) -> bytes:
    return bind(packed.digest, leg.transfer, leg.grant.generation, packed.work.chunk, packed.segment)


def segment_as_runs(source: SegmentSource, segment: int) -> Runs:
    """All runs of a segment, over its pieces."""
    parts = [
        runs(source.addresses[piece.block_idx], piece, source.plan.blocks[piece.block_idx])
        for piece in source.plan.pieces(segment)
    ]
    src_offsets, slot_offsets, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Runs(src_offsets, slot_offsets, lengths)
