"""What a worker knows of its agent, without any I/O: requests, open transfers, events.

Frames go in through `receive()`, frames to be sent come out of `outgoing`. Both clients, blocking and asyncio, are
thin drivers around it, so that the two cannot differ.

A transfer is open from the answer to its ticket, its first submit or its `open` until its one terminal event. Where
the caller's time-out strikes first, nobody knows yet whether the agent accepted: the transfer then counts as open and
is aborted, so that its pages come to rest and a terminal event says when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvxfer.control.codec import decode, encode
from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    AttachWorker,
    NewTicket,
    Ok,
    Open,
    PeerPoolMapped,
    PeerPoolUnmapped,
    Refused,
    RejectTicket,
    SlotsMapped,
    Submit,
    TicketMade,
    TransferEvent,
    WorkerReply,
    WorkerRequest,
)
from kvxfer.errors import AgentLostError, ContractError, ProtocolError, RefusedError
from kvxfer.transfer import EventKind, Reason

_REPLY_OF: dict[type[WorkerRequest], type[WorkerReply]] = {
    AttachWorker: Attached,
    NewTicket: TicketMade,
    Submit: Ok,
    Open: Ok,
    RejectTicket: Ok,
    AbortTransfer: Ok,
    SlotsMapped: Ok,
    PeerPoolMapped: Ok,
    PeerPoolUnmapped: Ok,
}


@dataclass(slots=True)
class _Pending:
    """A request without an answer. `given_up`: its caller has stopped waiting."""

    request: WorkerRequest
    given_up: bool = False


class ClientCore:
    """One worker's view of one run of its agent.

    `outgoing` are frames for the driver to send, oldest first. `dropped` counts frames that mean nothing here: what
    cannot be read, events of transfers that are not open, answers nobody asked for, words of a lost agent.
    """

    def __init__(self) -> None:
        self.outgoing: deque[bytes] = deque()
        self.dropped = 0
        self.num_events = 0
        """Events that have come from the agent, also of transfers that are not open."""
        self.lost: str | None = None
        """Why there is no agent any more; None while there is one."""
        self._next_id = 1
        self._pending: dict[int, _Pending] = {}
        self._replies: dict[int, tuple[WorkerReply, str | None]] = {}  # with the transfer that is open by it
        self._open: set[str] = set()
        self._doubtful: set[str] = set()  # open ones of which no request has been accepted so far
        self._events: dict[str, deque[TransferEvent]] = {}  # by transfer; never an empty queue

    @property
    def open_transfers(self) -> frozenset[str]:
        """Ids of the transfers whose terminal event has not come."""
        return frozenset(self._open)

    def request(self, request: WorkerRequest) -> int:
        """Queue `request`; returns the id that `take_reply` wants.

        Raises `ContractError` for one that the agent could not read, `AgentLostError` where there is no agent.
        """
        self.check_alive()
        try:
            frame = encode(request, self._next_id)
            decode(frame)  # Whatever the agent would drop is the caller's error, here and now.
        except (ProtocolError, TypeError, OverflowError) as error:
            raise ContractError(f"request: {error}") from error
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._pending[request_id] = _Pending(request)
        self.outgoing.append(frame)
        return request_id

    def receive(self, frame: bytes) -> None:
        """Apply one frame of the agent."""
        if self.lost is not None:
            self.dropped += 1
            return
        try:
            message, request_id = decode(frame)
        except ProtocolError:
            self.dropped += 1
            return
        if isinstance(message, TransferEvent):
            self.num_events += 1
            self._apply_event(message)
        elif isinstance(message, WorkerReply) and self._is_answer(request_id, message):
            self._apply_reply(request_id, message)
        else:
            self.dropped += 1

    def agent_lost(self, detail: str) -> None:
        """The agent is proven gone: end every open transfer with one `failed(agent_lost)`. Again: does nothing."""
        if self.lost is not None:
            return
        self._end(detail)
        for transfer in sorted(self._open):
            self._fail(transfer, Reason.AGENT_LOST, detail)

    def close(self) -> None:
        """Ask and hear nothing any more. Open transfers stay open: whether their pages are quiet is not known here."""
        if self.lost is None:
            self._end("this client was closed")

    def take_reply(self, request_id: int) -> WorkerReply | None:
        """The answer to a request, once; None while there is none.

        Raises `RefusedError` where the answer is a refusal, `AgentLostError` where none will come.
        """
        reply, _ = self._replies.pop(request_id, (None, None))
        if reply is None:
            self.check_alive()
        if isinstance(reply, Refused):
            raise RefusedError(reply.detail, reply.reason, reply.field)
        return reply

    def tell(self, request: WorkerRequest) -> None:
        """Queue `request`; nobody waits for its answer. Raises as `request`."""
        self._pending[self.request(request)].given_up = True

    def check_alive(self) -> None:
        """Raises `AgentLostError` where there is no agent any more."""
        if self.lost is not None:
            raise AgentLostError(f"no agent any more: {self.lost}; connect anew")

    def give_up(self, request_id: int) -> None:
        """The caller no longer waits: what the request has opened, or may have, is aborted."""
        reply, transfer = self._replies.pop(request_id, (None, None))
        pending = self._pending.get(request_id)
        if isinstance(reply, TicketMade):
            self._open.discard(reply.ticket.transfer)  # Nobody has seen the ticket.
        if pending is not None:
            pending.given_up = True
            transfer = _opens(pending.request)
            if transfer is not None and transfer not in self._open:
                self._open.add(transfer)
                self._doubtful.add(transfer)
        if transfer is not None and self.lost is None:
            self.tell(AbortTransfer(transfer=transfer))

    def take_event(self) -> TransferEvent | None:
        """The oldest event of the transfer that has waited longest, or None.

        Raises `AgentLostError` where none will ever come.
        """
        if not self._events:
            self.check_alive()
            return None
        transfer, events = next(iter(self._events.items()))
        event = events.popleft()
        if not events:
            del self._events[transfer]
        return event

    def take_terminal(self, transfer: str) -> TransferEvent | None:
        """The terminal event of `transfer`, or None while it is open; a `source_free` before it is dropped with it.

        Raises `ContractError` for a transfer that is neither open nor has an event left.
        """
        events = self._events.get(transfer)
        if events and _is_terminal(events[-1]):
            return self._events.pop(transfer)[-1]
        if transfer not in self._open:
            raise ContractError(
                f"transfer {transfer}: not open here: it is unknown, or its terminal event was taken already"
            )
        self.check_alive()
        return None

    def _end(self, detail: str) -> None:
        self.lost = detail
        self.outgoing.clear()
        self._pending.clear()

    def _apply_event(self, event: TransferEvent) -> None:
        if event.transfer not in self._open:
            self.dropped += 1
            return
        self._events.setdefault(event.transfer, deque()).append(event)
        if _is_terminal(event):
            self._open.discard(event.transfer)
            self._doubtful.discard(event.transfer)

    def _is_answer(self, request_id: int, reply: WorkerReply) -> bool:
        pending = self._pending.get(request_id)
        return pending is not None and isinstance(reply, Refused | _REPLY_OF[type(pending.request)])

    def _apply_reply(self, request_id: int, reply: WorkerReply) -> None:
        pending = self._pending.pop(request_id)
        request = pending.request
        if isinstance(request, AbortTransfer) and isinstance(reply, Refused) and _is_unknown(reply):
            reply = Ok()  # It ended by itself in the meantime.
        if isinstance(reply, TicketMade) and pending.given_up:
            self.tell(AbortTransfer(transfer=reply.ticket.transfer))  # Nobody has seen the ticket.
            return
        transfer = reply.ticket.transfer if isinstance(reply, TicketMade) else _opens(request)
        if transfer is not None:
            self._settle(transfer, reply)
        if not pending.given_up:
            opened = None if isinstance(reply, Refused) else transfer
            self._replies[request_id] = (reply, opened)

    def _settle(self, transfer: str, reply: WorkerReply) -> None:
        """A request that opens `transfer` was accepted or refused."""
        if not isinstance(reply, Refused):
            self._open.add(transfer)
            self._doubtful.discard(transfer)
        elif transfer in self._doubtful and all(_opens(other.request) != transfer for other in self._pending.values()):
            # The agent never had it, so it touches no page of it.
            self._fail(transfer, reply.reason, reply.detail)

    def _fail(self, transfer: str, reason: Reason | None, detail: str) -> None:
        self._apply_event(TransferEvent(transfer=transfer, event=EventKind.FAILED, reason=reason, detail=detail[:2000]))


def _opens(request: WorkerRequest) -> str | None:
    """The transfer that is open once `request` is accepted."""
    match request:
        case Submit():
            return request.transfer
        case Open():
            return request.ticket.transfer
        case _:
            return None


def _is_terminal(event: TransferEvent) -> bool:
    return event.event is not EventKind.SOURCE_FREE


def _is_unknown(reply: Refused) -> bool:
    return reply.reason is Reason.UNKNOWN_TRANSFER
