"""The other end of a client core, and short names for what the two say."""

from __future__ import annotations

from kvxfer.control.client_core import ClientCore
from kvxfer.control.client_requests import open_request, submit_request
from kvxfer.control.codec import decode, encode
from kvxfer.control.messages import (
    Message,
    Ok,
    Open,
    Source,
    Submit,
    Ticket,
    TransferEvent,
)
from kvxfer.transfer import EventKind, Reason

A, B, C = "a" * 32, "b" * 32, "c" * 32


def ticket(transfer: str) -> Ticket:
    return Ticket(transfer=transfer, sources=(Source(endpoint="tcp://127.0.0.1:1", incarnation=C),))


def submit(transfer: str) -> Submit:
    return submit_request(transfer, {}, None, False, b"", 60.0)


def open_(transfer: str) -> Open:
    return open_request(ticket(transfer), {}, 60.0)


def event(transfer: str, kind: EventKind = EventKind.SENT, reason: Reason | None = None) -> TransferEvent:
    return TransferEvent(transfer=transfer, event=kind, reason=reason)


def landed(transfer: str) -> TransferEvent:
    """The event of a transfer that came with some bytes."""
    return TransferEvent(transfer=transfer, event=EventKind.LANDED, aux=(b"token",))


class Agent:
    """The other end of a core."""

    def __init__(self) -> None:
        self.core = ClientCore()

    def asked(self) -> list[tuple[Message, int]]:
        """What the core has sent since the last call, with the request ids."""
        frames = [decode(frame) for frame in self.core.outgoing]
        self.core.outgoing.clear()
        return frames

    def say(self, message: Message, request_id: int = 0) -> None:
        self.core.receive(encode(message, request_id))

    def opened(self, transfer: str) -> None:
        """A transfer that was opened and accepted."""
        request_id = self.core.request(open_(transfer))
        self.say(Ok(), request_id)
        assert self.core.take_reply(request_id) == Ok()
