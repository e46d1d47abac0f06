"""The worker library: how an engine process talks to its kvxfer agent.

`PrefillClient` and `DecodeClient` block with time-outs; `AsyncPrefillClient` and `AsyncDecodeClient` are their asyncio
twins. A client belongs to one thread (or one event loop) and to one run of its agent; after `AgentLostError` make a
new one.

    with PrefillClient.connect("/run/kvxfer/prefill", memory, layout) as client:
        ticket = client.ticket()                        # encode_ticket(ticket) goes to the router
        client.submit(ticket, {"kv": ChunkPages(0, 4096, pages)}, last=True)
        event = client.wait(ticket, timeout_s=60)       # SENT, FAILED or ABORTED; the pages are quiet

All times are seconds. Pages are quiet, that is free to be reused, once the transfer's terminal event is here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from kvxfer.control.aio_client import AsyncDecodeClient, AsyncPrefillClient
from kvxfer.control.channel import Selector
from kvxfer.control.client_link import AgentLink, hand_over_pool
from kvxfer.control.client_requests import (
    ChunkPages,
    ReceivePages,
    check_role,
    open_request,
    reject_request,
    submit_request,
    ticket_request,
    transfer_id,
)
from kvxfer.control.handoff_messages import PoolPlacement
from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    AttachWorker,
    Source,
    Ticket,
    TicketMade,
    TransferEvent,
    WorkerReply,
    WorkerRequest,
)
from kvxfer.control.shared_memory import PoolMemory
from kvxfer.errors import ControlTimeoutError
from kvxfer.layout import PoolLayout

__all__ = [
    "AsyncDecodeClient",
    "AsyncPrefillClient",
    "ChunkPages",
    "DecodeClient",
    "PrefillClient",
    "ReceivePages",
]

_Found = TypeVar("_Found")


class _Client:
    """What both roles share."""

    _is_prefill: bool

    def __init__(self, link: AgentLink) -> None:
        """Take over `link`. Use `connect`."""
        self._link = link
        self._core = link.core
        self._selector = Selector([link.channel, link.handoff])
        self._attached: Attached | None = None

    @classmethod
    def connect(
        cls,
        socket_dir: str | os.PathLike[str],
        memory: PoolMemory,
        layout: PoolLayout,
        *,
        placement: PoolPlacement | None = None,
        timeout_s: float = 10.0,
    ) -> Self:
        """Hand the pool `memory`, which lies as `layout` says, to the agent at `socket_dir` and attach to it.

        `memory`: a `HostMemory`, or on a GPU a `kvxfer.streams.device.DevicePool` or what `allocate_pool` gives.
        `placement`: who moves the pool's rows. `"agent"`: the agent, which maps the pool (default of host pools).
        `"worker"`: a stream of this process, by the agent's orders, fed from within this client's calls (default of
        pools on a GPU).

        Waits for the agent up to `timeout_s` in all, also for one that has yet to start, and for longer where it says
        that it prepares to map a pool of a GPU or a stream is made here. `memory` stays the caller's:
        close it after the client. Raises `HandoffError` where the agent refuses the pool, `LayoutError` where `layout`
        goes beyond it, `RefusedError` where the agent takes no worker, `PairingError` for an agent of the other role,
        `AgentLostError` where there is none, `ControlTimeoutError` where it does not answer, `ContractError` for a
        placement that the memory cannot have and for arguments of other types, `TransportError` where the GPU refuses.
        """
        handed_over = hand_over_pool(socket_dir, memory, layout, placement, timeout_s, is_prefill=cls._is_prefill)
        client = cls(AgentLink(socket_dir, handed_over))
        try:
            attach = AttachWorker(pool=handed_over.connection.pool)
            reply = client._call(attach, timeout_s - handed_over.waited_s)
            client._attached = check_role(reply, cls._is_prefill, socket_dir)
        except BaseException:
            client.close()
            raise
        return client

    @property
    def incarnation(self) -> str:
        """Id of this run of the agent."""
        assert self._attached is not None
        return self._attached.incarnation

    @property
    def open_transfers(self) -> frozenset[str]:
        """Ids of the transfers whose terminal event has not come."""
        return self._core.open_transfers

    def abort(self, transfer: Ticket | str, *, timeout_s: float = 10.0) -> None:
        """End `transfer` early. Its terminal event says when its pages are quiet and which came first, end or abort.

        Does nothing where it is not open here. Raises `AgentLostError`, `ControlTimeoutError`.
        """
        name = transfer_id(transfer)
        if name in self._core.open_transfers:
            self._call(AbortTransfer(transfer=name), timeout_s)

    def next_event(self, timeout_s: float | None = None) -> TransferEvent | None:
        """The next event of any transfer; None after `timeout_s` (None: wait without limit, 0: only look).

        Raises `AgentLostError` where the agent is lost and all events have been taken.
        """
        return self._until(self._core.take_event, timeout_s)

    def wait(self, transfer: Ticket | str, timeout_s: float | None) -> TransferEvent:
        """The terminal event of `transfer`. Events of other transfers stay for their own `wait` or `next_event`.

        Raises `ControlTimeoutError` where it does not come within `timeout_s` (the transfer is still open then),
        `ContractError` where the transfer is not open and has no event left.
        """
        name = transfer_id(transfer)
        event = self._until(partial(self._core.take_terminal, name), timeout_s)
        if event is None:
            raise ControlTimeoutError(f"transfer {name}: no terminal event within {timeout_s} s")
        return event

    def close(self) -> None:
        """Leave the agent: it aborts what is open and unmaps the pool. Calling it again does nothing.

        Until the agent has done so it may still touch pages of transfers that were open: wait for them first, or let
        the pool's memory go with them.
        """
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, request: WorkerRequest, timeout_s: float) -> WorkerReply:
        request_id = self._core.request(request)
        look: Callable[[], WorkerReply | None] = partial(self._core.take_reply, request_id)
        reply: WorkerReply | None = None
        try:
            reply = self._until(look, timeout_s)
        finally:
            if reply is None:  # Timed out or interrupted; giving up what was refused does nothing.
                self._core.give_up(request_id)
                self._link.flush()
        if reply is None:
            raise ControlTimeoutError(f"{type(request).__name__}: the agent gave no answer within {timeout_s} s")
        return reply

    def _until(self, look: Callable[[], _Found], timeout_s: float | None) -> _Found:
        """What `look` finds, as soon as it finds something; None after the time-out, when all was read once more."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._link.flush()
        while (found := look()) is None:
            remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
            waits_s = [each for each in (remaining_s, self._link.backlog_s) if each is not None]
            ready = self._selector.wait(min(waits_s, default=None))
            self._link.turn(has_news=bool(ready))
            if remaining_s is not None and remaining_s <= 0:
                return look()
        return found


class PrefillClient(_Client):
    """A prefill worker's side: makes tickets and hands chunks to the agent, which sends them."""

    _is_prefill = True

    @property
    def source(self) -> Source:
        """This agent as decode agents reach it: for the sibling worker that makes the group's tickets."""
        assert self._attached is not None
        assert self._attached.source is not None
        return self._attached.source

    def ticket(
        self,
        *,
        sources: Sequence[Source] = (),
        num_decode_groups: int = 1,
        deadline_s: float = 60.0,
        timeout_s: float = 10.0,
    ) -> Ticket:
        """Begin a transfer. The ticket goes to the decode side (`kvxfer.control.codec.encode_ticket` makes text).

        `sources`: the other agents of the same prefill group, in any order, where several feed the transfer; each of
        their workers submits its own chunks. `num_decode_groups`: so many decode groups receive the transfer, each in
        full; `source_free` and `sent` wait for the last of them. `deadline_s`: without its end by then the transfer
        fails.
        Raises `RefusedError`, `AgentLostError`, `ControlTimeoutError`.
        """
        reply = self._call(ticket_request(sources, num_decode_groups, deadline_s), timeout_s)
        assert isinstance(reply, TicketMade)
        return reply.ticket

    def mark(self, stream: object | None = None) -> int:
        """A value for `submit(ready=)`: the timeline reaches it once `stream` has done what it was given so far.

        `stream`: one of the pool's device, a `torch.cuda.Stream` or its handle; None for the current one. For host
        pools None alone: their rows are written when the call that writes them returns. Raises `AgentLostError`.
        """
        return self._link.mark(stream)

    def submit(
        self,
        transfer: Ticket | str,
        groups: Mapping[str, ChunkPages],
        *,
        layers: tuple[int, int] | None = None,
        last: bool = False,
        aux: bytes = b"",
        ready: int | None = None,
        deadline_s: float = 60.0,
        timeout_s: float = 10.0,
    ) -> None:
        """Hand over one chunk whose KV is complete in its pages, or will be once the timeline has reached `ready`. The
        pages may change after `source_free` or the terminal event, not before.

        `transfer`: the ticket, its text, or the transfer's id. `groups`: by name as in the layout; a group without
        rows in this chunk is left out. `layers`: global layers `(first, end)` that are complete, None for all.
        `last`: no chunk follows. `aux`: up to 64 KiB that arrive with `landed`. `ready`: what `mark` has returned; None
        marks the current stream here and now.
        Raises `RefusedError` with `reason` and `detail` (nothing was changed), `ContractError` for pages or ranges that
        cannot be, `AgentLostError`, and `ControlTimeoutError`: then the transfer is aborted, for nobody knows whether
        the chunk was accepted.
        """
        marked = self.mark() if ready is None else ready
        self._call(submit_request(transfer, groups, layers, last, aux, deadline_s, marked), timeout_s)


class DecodeClient(_Client):
    """A decode worker's side: gives pages to the agent, which fills them."""

    _is_prefill = False

    def open(
        self,
        ticket: Ticket | str,
        groups: Mapping[str, ReceivePages],
        *,
        deadline_s: float = 60.0,
        timeout_s: float = 10.0,
    ) -> None:
        """Receive the transfer of `ticket` (or its text) into these pages. They belong to the agent until the
        terminal event: `landed` when every owned row of every group is there, `failed` or `aborted` otherwise.

        `groups`: by name as in the layout. `deadline_s`: without its end by then the transfer fails.
        Raises `RefusedError` with `reason` and `detail` (nothing was changed), `ProtocolError` for text that is no
        ticket, `ContractError` for pages or ranges that cannot be, `AgentLostError`, and `ControlTimeoutError`: then
        the transfer is aborted, and its pages are quiet after its terminal event.
        """
        self._call(open_request(ticket, groups, deadline_s), timeout_s)

    def reject(self, ticket: Ticket | str, *, timeout_s: float = 10.0) -> None:
        """Say that this side will never open `ticket` (or its text), so that the prefill worker hears of it at once
        instead of waiting for its deadline. No event follows.

        Raises `RefusedError` for a transfer that is open (abort it), `ProtocolError`, `AgentLostError`,
        `ControlTimeoutError`.
        """
        self._call(reject_request(ticket), timeout_s)
