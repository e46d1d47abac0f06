"""What becomes of a transfer on the decode side: grants, landed, failed, and the closing of its legs.

A transfer lands when every row that it was opened for has been put into its pages. Otherwise it ends once the own
scatters have drained, whatever the peers do; its legs are closed later, when no write of theirs can be under way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvxfer.control.messages import AbortLeg, Grant, Pulled, Query, TransferEvent
from kvxfer.decode.actions import Action, Notify, SendToPeer
from kvxfer.decode.lender import SlotLender
from kvxfer.decode.receive import Receive, ReceiveLeg
from kvxfer.errors import LayoutError, PairingError
from kvxfer.layout import PoolLayout, TokenRange
from kvxfer.ops.totals import Totals
from kvxfer.routes import check_complete
from kvxfer.slots import SlotTable
from kvxfer.transfer import EventKind, Reason, ReceiveState
from kvxfer.wire import plan_chunk

REMIND_S = 1.0
MAX_DETAIL = 1000


class Lifecycle:
    """All transfers with a leg that is not closed, and the moves between their states."""

    def __init__(self, slots: SlotTable, credits_per_leg: int, outbox: list[Action]) -> None:
        self.lender = SlotLender(slots, credits_per_leg, outbox)
        self.receives: dict[str, Receive] = {}
        self.totals = Totals(logging.getLogger("kvxfer.decode"))
        self.clock: Callable[[], float] = time.perf_counter
        self.num_moves_to_come = 0
        """Scatters and pulls that were announced and not emitted, of open transfers: the sum over their legs."""
        self._outbox = outbox

    def grant(self, receive: Receive, layout: PoolLayout, floor: int, now: float) -> None:
        """Send every source its grant once all are paired. What they cannot deliver together ends the transfer."""
        if receive.state is not ReceiveState.OPEN or any(leg.info is None for leg in receive.legs):
            return
        wanted = {group.name: TokenRange(0, 0) for group in layout.groups}
        wanted |= {name: table.token_range for name, table in receive.tables.items()}
        have = [receive.have.get(group.name, ()) for group in layout.groups]
        routes = [leg.info.route for leg in receive.legs if leg.info is not None]
        try:
            check_complete(routes, layout, [wanted[group.name] for group in layout.groups], have)
            for leg in receive.legs:
                self._fill_grant(receive, leg, wanted)
        except (LayoutError, PairingError) as error:
            self.fail(receive, Reason.LAYOUT_MISMATCH, str(error), now)
            return
        receive.move(ReceiveState.WAITING)
        for leg in receive.legs:
            leg.is_granted = True
            leg.asked_at = now
            grant = Grant(
                transfer=leg.transfer,
                generation=leg.generation,
                home=leg.source_idx == 0,
                wanted=leg.wanted,
                have=leg.have,
                remaining_s=max(0.0, receive.deadline - now),
                floor=floor,
                num_decode_groups=receive.num_decode_groups,
                can_pull=leg.info is not None and leg.info.layout is not None,
                pull_trouble=leg.info.pull_trouble[:MAX_DETAIL] if leg.info is not None else "",
            )
            self._outbox.append(SendToPeer(leg.source.incarnation, grant))

    def _fill_grant(self, receive: Receive, leg: ReceiveLeg, wanted: dict[str, TokenRange]) -> None:
        assert leg.info is not None
        route = leg.info.route
        leg.wanted = tuple(wanted[group.name] for group in route.groups)
        leg.have = tuple(receive.have.get(group.name, ()) for group in route.groups)
        owed = plan_chunk(route, leg.wanted, leg.wanted, leg.have, None, leg.info.segment_bytes)
        leg.owed_rows = owed.num_rows

    def advance(self, receive: Receive, now: float) -> None:
        """End the transfer if that has become possible."""
        if receive.state is ReceiveState.WAITING and receive.has_come:
            problem = next((text for leg in receive.legs if (text := _count_problem(leg)) is not None), None)
            if problem is not None:
                self.fail(receive, Reason.INCOMPLETE, problem, now)
            elif receive.num_scattering == 0:
                receive.move(ReceiveState.LANDED)
                for leg in receive.legs:
                    self.close(leg, frozenset())
                self._notify(receive, EventKind.LANDED, now)
        self.settle(receive, now)

    def fail(self, receive: Receive, reason: Reason, detail: str, now: float) -> None:
        """End the transfer without success. Does nothing to one that is ending already."""
        if not receive.is_open:
            self.settle(receive, now)
            return
        receive.move(ReceiveState.DRAINING)
        receive.reason, receive.detail = reason, detail[:MAX_DETAIL]
        receive.cancel.is_set = True
        for leg in receive.legs:
            self.expect_moves(leg, -leg.num_moves_to_come)
            self.lender.drop_wants(leg)
            if not leg.is_closed:
                self.abort(receive, leg, now)
        self.settle(receive, now)

    def expect_moves(self, leg: ReceiveLeg, num_more: int) -> None:
        """So many more moves will follow for `leg` if nothing ends early; fewer where some were emitted."""
        leg.num_moves_to_come += num_more
        self.num_moves_to_come += num_more

    def settle(self, receive: Receive, now: float) -> None:
        """Give the terminal event of a failed transfer when its pages are quiet; forget it when its legs are closed."""
        if receive.state is ReceiveState.DRAINING and receive.num_scattering == 0:
            receive.move(ReceiveState.ENDED)
            aborted = receive.reason is Reason.ABORTED_BY_WORKER
            self._notify(receive, EventKind.ABORTED if aborted else EventKind.FAILED, now)
        if receive.has_ended and all(leg.is_closed for leg in receive.legs):
            self.receives.pop(receive.transfer, None)

    def close(self, leg: ReceiveLeg, unknown_slots: frozenset[int]) -> None:
        """Nothing of `leg` can reach a landing slot any more, but for `unknown_slots`."""
        if leg.is_closed:
            return
        leg.is_closed = True
        self.lender.close(leg, unknown_slots)

    def abort(self, receive: Receive, leg: ReceiveLeg, now: float) -> None:
        """Tell the source of an ended transfer, also one without a grant: its worker need not wait for a deadline.

        A source that is not paired answers once it is; its leg is closed then.
        """
        leg.asked_at = now
        reason = receive.reason or Reason.ABORTED_BY_PEER
        message = AbortLeg(transfer=leg.transfer, generation=leg.generation, reason=reason, detail=receive.detail)
        self._outbox.append(SendToPeer(leg.source.incarnation, message))

    def remind(self, receive: Receive, now: float) -> None:
        """Ask silent legs how far they are; repeat aborts that were not answered."""
        for leg in receive.legs:
            if leg.is_closed or leg.info is None or now < leg.asked_at + REMIND_S:
                continue
            if not receive.is_open:
                self.abort(receive, leg, now)
            elif leg.is_granted:
                leg.asked_at = now
                query = Query(transfer=leg.transfer, generation=leg.generation)
                self._outbox.append(SendToPeer(leg.source.incarnation, query))
                for chunk_idx, chunk in leg.chunks.items():
                    if chunk.is_pulled and chunk.num_missing == 0:
                        self.report_pulled(leg, chunk_idx)

    def report_pulled(self, leg: ReceiveLeg, chunk: int) -> None:
        """Tell a source that the rows of `chunk` are read no more; again while it is silent, the first may be lost."""
        pulled = Pulled(transfer=leg.transfer, generation=leg.generation, chunk=chunk)
        self._outbox.append(SendToPeer(leg.source.incarnation, pulled))

    def _notify(self, receive: Receive, kind: EventKind, now: float) -> None:
        """Count the end, and tell the worker, where there is one."""
        num_bytes = sum(leg.num_bytes for leg in receive.legs)
        self.totals.ended(receive.transfer, kind, receive.reason, receive.detail, num_bytes)
        if receive.is_orphan:
            return
        landed = kind is EventKind.LANDED
        event = TransferEvent(
            transfer=receive.transfer,
            event=kind,
            reason=receive.reason,
            detail=receive.detail,
            aux=tuple(leg.finished.aux for leg in receive.legs if leg.finished is not None) if landed else (),
            stats=receive.stats(now),
        )
        self._outbox.append(Notify(event))


def _count_problem(leg: ReceiveLeg) -> str | None:
    """What a finished leg delivered against what it announced at the end and what it owed."""
    finished = leg.finished
    assert finished is not None
    if (leg.num_segments, leg.num_bytes) != (finished.num_segments, finished.num_bytes):
        return (
            f"source {leg.source_idx}: got {leg.num_segments} segments of {leg.num_bytes} bytes, "
            f"expected {finished.num_segments} of {finished.num_bytes}"
        )
    if leg.num_rows != leg.owed_rows:
        return f"source {leg.source_idx}: got {leg.num_rows} rows, expected {leg.owed_rows}"
    return None
