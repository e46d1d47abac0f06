"""A worker as a forked process: it does what it is told, reports every event, and knows what its pool must hold."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from kvxfer.control.channel import Selector
from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.control.codec import decode_ticket, encode_ticket
from kvxfer.control.messages import Ticket, TransferEvent
from kvxfer.errors import AgentLostError, KvxferError, RefusedError
from kvxfer.layout import PoolLayout, TokenRange
from kvxfer.transfer import EventKind
from tests.agent_world import Seat, chunk_pages, receive_pages, write_rows
from tests.faults.census import census
from tests.faults.forked import Message, Wire
from tests.wire_world import Worker

_CONNECT_S = 20.0
_AGE_S = 0.5  # after which the client is looked at without having called


class WorkerChild:
    """One worker. Pages of ended transfers are used again."""

    def __init__(self, role: str, socket_dir: Path, layout: PoolLayout, wire: Wire, seed: int) -> None:
        self._wire = wire
        self._role = role
        self._seat = Seat(socket_dir, layout, random.Random(seed))
        self._requests: dict[str, tuple[Worker, int]] = {}  # open ones, with their salt
        self._client: PrefillClient | DecodeClient | None = None
        self._connect()

    def _connect(self) -> None:
        kind = PrefillClient if self._role == "prefill" else DecodeClient
        if self._client is not None:
            self._client.close()
        seat = self._seat
        self._client = kind.connect(seat.socket_dir, seat.memory, seat.layout, timeout_s=_CONNECT_S)
        link = self._client._link
        self._selector = Selector([link.channel, link.handoff, self._wire])

    def run(self) -> None:
        """Serve until the parent hangs up."""
        self._wire.send({"ready": True})
        while True:
            while self._client is not None and self._look(self._client):
                pass
            if self._wire in self._selector.wait(_AGE_S):
                message = self._wire.receive()
                if message is None:
                    break
                self._serve(message)
        if self._client is not None:
            self._client.close()
        self._seat.close()

    def _look(self, client: PrefillClient | DecodeClient) -> bool:
        """Take an event; whether there was one."""
        try:
            event = client.next_event(0)
        except AgentLostError as error:
            self._wire.send({"lost": str(error), "at": time.monotonic()})
            self._selector = Selector([self._wire])
            client.close()
            self._client = None
            return False
        if event is not None and event.event is not EventKind.SOURCE_FREE:
            self._ended(event)
        return event is not None

    def _ended(self, event: TransferEvent) -> None:
        """From now on the pages are quiet: what a failed transfer has left there is there to stay."""
        problem = ""
        at = time.monotonic()
        request, salt = self._forget(event.transfer)
        if self._role == "decode":
            expected = self._seat.expected
            if event.event is EventKind.LANDED:
                write_rows(expected, request, salt)
                problem = self._check()
            else:
                for first, end in _row_spans(request):
                    expected[first:end] = self._seat.memory.array[first:end]
        self._wire.send(
            {
                "event": event.event.value,
                "transfer": event.transfer,
                "reason": event.reason.value if event.reason is not None else "",
                "detail": event.detail,
                "problem": problem,
                "at": at,
            }
        )

    def _forget(self, transfer: str) -> tuple[Worker, int]:
        """The request has ended: its pages are free."""
        request, salt = self._requests.pop(transfer)
        for free, pages in zip(self._seat._free, request.pages, strict=True):
            free |= set(pages.tolist())
        return request, salt

    def _check(self) -> str:
        """What is wrong with the pool, outside of the rows of transfers under way; empty if nothing is."""
        wrong = self._seat.memory.array != self._seat.expected
        for request, _ in self._requests.values():
            for first, end in _row_spans(request):
                wrong[first:end] = False
        found = np.flatnonzero(wrong)
        return f"{found.size} bytes differ, the first at {found[0]}" if found.size else ""

    def _serve(self, message: Message) -> None:
        reply: Message = {"re": message["id"]}
        try:
            reply |= self._do(message)
        except (KvxferError, ValueError) as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        self._wire.send(reply)

    def _do(self, message: Message) -> Message:
        client = self._client
        match message["do"]:
            case "census":
                return {"census": census()}
            case "check":
                return {"problem": self._check()}
            case "connect":
                self._connect()
                return {}
            case "begin":
                assert isinstance(client, PrefillClient)
                return self._begin(client, message)
            case "submit":
                assert isinstance(client, PrefillClient)
                request, _ = self._requests[message["transfer"]]
                self._submit(client, message, request)
                return {}
            case "open":
                assert isinstance(client, DecodeClient)
                self._open(client, message)
                return {}
            case "abort":
                assert client is not None
                client.abort(message["transfer"])
                return {}
            case _:
                raise ValueError(message)

    def _begin(self, client: PrefillClient, message: Message) -> Message:
        """Write the rows, take a ticket; with `submit_all` submit them, too."""
        request = self._take(message["num_tokens"])
        write_rows(self._seat.memory.array, request, message["salt"])
        ticket = client.ticket(deadline_s=message["deadline_s"])
        self._requests[ticket.transfer] = (request, message["salt"])
        if message["submit_all"]:
            middle = message["num_tokens"] // 2
            whole = {"transfer": ticket.transfer, "num_tokens": message["num_tokens"], **message}
            self._submit(client, {**whole, "first": 0, "end": middle}, request)
            self._submit(client, {**whole, "first": middle, "end": message["num_tokens"]}, request)
        return {"ticket": encode_ticket(ticket), "transfer": ticket.transfer}

    def _submit(self, client: PrefillClient, message: Message, request: Worker) -> None:
        first, end, deadline_s = message["first"], message["end"], message["deadline_s"]
        groups = chunk_pages(request, first, end)
        client.submit(message["transfer"], groups, last=end == message["num_tokens"], deadline_s=deadline_s)

    def _open(self, client: DecodeClient, message: Message) -> None:
        ticket: Ticket = decode_ticket(message["ticket"])
        request = self._take(message["num_tokens"])
        self._requests[ticket.transfer] = (request, message["salt"])
        try:
            client.open(ticket, receive_pages(request), deadline_s=message["deadline_s"])
        except RefusedError:
            self._forget(ticket.transfer)
            raise

    def _take(self, num_tokens: int) -> Worker:
        ranges = [TokenRange(0, num_tokens) for _ in self._seat.layout.groups]
        return self._seat.take_pages(ranges)


def _row_spans(request: Worker) -> list[tuple[int, int]]:
    """Where the request's rows lie in its pool, as `[first, end)` bytes."""
    return [
        (address, address + group.row_bytes)
        for idx, group in enumerate(request.layout.groups)
        for layer in range(group.layers.first, group.layers.end)
        for address in request.row_addresses(idx, layer).values()
    ]


def run_worker(role: str, socket_dir: Path, layout: PoolLayout, seed: int, wire: Wire) -> None:
    """The program of a worker's process."""
    WorkerChild(role, socket_dir, layout, wire, seed).run()
