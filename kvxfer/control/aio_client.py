"""The asyncio twins of the worker library. Every method does what its blocking namesake in `client.py` does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from kvxfer.control.client_link import AgentLink, HandedOver, hand_over_pool
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

_Found = TypeVar("_Found")


class _AsyncClient:
    """What both roles share. Any number of tasks of one event loop may use a client at once."""

    _is_prefill: bool

    def __init__(self, link: AgentLink, loop: asyncio.AbstractEventLoop) -> None:
        """Take over `link` and let `loop` read it. Use `connect`."""
        self._link = link
        self._core = link.core
        self._loop = loop
        self._changed = asyncio.Event()
        self._attached: Attached | None = None
        self._feeding: asyncio.TimerHandle | None = None  # while the stream has no room for entries that are wanted
        self._descriptors: tuple[int, ...] = (link.channel.fileno(), link.handoff.fileno())
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self._drain)

    @classmethod
    async def connect(
        cls,
        socket_dir: str | os.PathLike[str],
        memory: PoolMemory,
        layout: PoolLayout,
        *,
        placement: PoolPlacement | None = None,
        timeout_s: float = 10.0,
    ) -> Self:
        """As `PrefillClient.connect`. The hand-over itself runs on a thread of its own."""
        handed_over = await _hand_over(socket_dir, memory, layout, placement, timeout_s, is_prefill=cls._is_prefill)
        client = cls(AgentLink(socket_dir, handed_over), asyncio.get_running_loop())
        try:
            attach = AttachWorker(pool=handed_over.connection.pool)
            reply = await client._call(attach, timeout_s - handed_over.waited_s)
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

    async def abort(self, transfer: Ticket | str, *, timeout_s: float = 10.0) -> None:
        """As `PrefillClient.abort`."""
        name = transfer_id(transfer)
        if name in self._core.open_transfers:
            await self._call(AbortTransfer(transfer=name), timeout_s)

    async def next_event(self, timeout_s: float | None = None) -> TransferEvent | None:
        """As `PrefillClient.next_event`."""
        return await self._until(self._core.take_event, timeout_s)

    async def wait(self, transfer: Ticket | str, timeout_s: float | None) -> TransferEvent:
        """As `PrefillClient.wait`."""
        name = transfer_id(transfer)
        event = await self._until(partial(self._core.take_terminal, name), timeout_s)
        if event is None:
            raise ControlTimeoutError(f"transfer {name}: no terminal event within {timeout_s} s")
        return event

    def close(self) -> None:
        """As `PrefillClient.close`. Tasks that still wait get `AgentLostError`."""
        self._stop_reading()
        self._link.close()
        self._drain()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _call(self, request: WorkerRequest, timeout_s: float) -> WorkerReply:
        request_id = self._core.request(request)
        look: Callable[[], WorkerReply | None] = partial(self._core.take_reply, request_id)
        reply: WorkerReply | None = None
        try:
            reply = await self._until(look, timeout_s)
        finally:
            if reply is None:  # Timed out or cancelled; giving up what was refused does nothing.
                self._core.give_up(request_id)
                self._drain()
        if reply is None:
            raise ControlTimeoutError(f"{type(request).__name__}: the agent gave no answer within {timeout_s} s")
        return reply

    async def _until(self, look: Callable[[], _Found], timeout_s: float | None) -> _Found:
        """What `look` finds, as soon as it finds something; None after the time-out, when all was read once more."""
        deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._drain()
        while (found := look()) is None:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                self._drain()
                return look()
        return found

    def _drain(self) -> None:
        """Read, apply and send everything, then wake the tasks that wait.

        ZMQ's descriptor wakes at an edge, and a send may swallow the edge of what arrived meanwhile: so this goes on
        until there is nothing to read.
        """
        if self._core.lost is None:
            self._link.flush()
            self._link.drain()
            while self._core.lost is None and self._link.channel.readable():
                self._link.drain()
        if self._core.lost is not None:
            self._stop_reading()
        if self._link.backlog_s is not None and self._feeding is None:
            self._feeding = self._loop.call_later(self._link.backlog_s, self._feed)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _feed(self) -> None:
        """Enqueue entries for which there was no room."""
        self._feeding = None
        self._drain()

    def _stop_reading(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
            self._feeding = None
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors = ()


class AsyncPrefillClient(_AsyncClient):
    """`PrefillClient` for asyncio."""

    _is_prefill = True

    @property
    def source(self) -> Source:
        """This agent as decode agents reach it: for the sibling worker that makes the group's tickets."""
        assert self._attached is not None
        assert self._attached.source is not None
        return self._attached.source

    async def ticket(
        self,
        *,
        sources: Sequence[Source] = (),
        num_decode_groups: int = 1,
        deadline_s: float = 60.0,
        timeout_s: float = 10.0,
    ) -> Ticket:
        """As `PrefillClient.ticket`."""
        reply = await self._call(ticket_request(sources, num_decode_groups, deadline_s), timeout_s)
        assert isinstance(reply, TicketMade)
        return reply.ticket

    def mark(self, stream: object | None = None) -> int:
        """As `PrefillClient.mark`."""
        return self._link.mark(stream)

    async def submit(
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
        """As `PrefillClient.submit`."""
        marked = self.mark() if ready is None else ready
        await self._call(submit_request(transfer, groups, layers, last, aux, deadline_s, marked), timeout_s)


class AsyncDecodeClient(_AsyncClient):
    """`DecodeClient` for asyncio."""

    _is_prefill = False

    async def open(
        self,
        ticket: Ticket | str,
        groups: Mapping[str, ReceivePages],
        *,
        deadline_s: float = 60.0,
        timeout_s: float = 10.0,
    ) -> None:
        """As `DecodeClient.open`."""
        await self._call(open_request(ticket, groups, deadline_s), timeout_s)

    async def reject(self, ticket: Ticket | str, *, timeout_s: float = 10.0) -> None:
        """As `DecodeClient.reject`."""
        await self._call(reject_request(ticket), timeout_s)


async def _hand_over(
    socket_dir: str | os.PathLike[str],
    memory: PoolMemory,
    layout: PoolLayout,
    placement: PoolPlacement | None,
    timeout_s: float,
    *,
    is_prefill: bool,
) -> HandedOver:
    executor = ThreadPoolExecutor(1, "kvxfer-handoff")
    hand = partial(hand_over_pool, is_prefill=is_prefill)
    future = executor.submit(hand, socket_dir, memory, layout, placement, timeout_s)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(_close_unwanted)  # The thread goes on, and nobody will have its result.
        raise
    finally:
        executor.shutdown(wait=False)


def _close_unwanted(future: Future[HandedOver]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
