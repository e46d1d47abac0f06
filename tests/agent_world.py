"""Real agents on threads, with real workers' clients over shared memory, and the bytes that every pool must hold.

A `Seat` is one worker with its agent. What a transfer must do to a decode worker's pool is written into `expected`,
computed row by row as in `wire_world`; `verify` then compares whole pools: a byte too much is found like one too few.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.control.client import ChunkPages, DecodeClient, PrefillClient, ReceivePages
from kvxfer.control.handoff_messages import PoolPlacement
from kvxfer.control.messages import Ticket, TransferEvent
from kvxfer.control.shared_memory import PoolMemory
from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import ControlTimeoutError
from kvxfer.layout import Placement, PoolLayout, TokenRange
from kvxfer.memory import HostMemory
from kvxfer.ops.config import DecodeConfig, PrefillConfig, SlotConfig, TransportConfig
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.transfer import EventKind
from tests.wire_world import GUARD_BYTES, POISON, Worker, row_value, state_value

WAIT_S = 20.0
SLOT_BYTES = 160
_STEP_S = 0.002


class AgentThread:
    """An agent that runs on a thread until `end()`, which gives everything back."""

    def __init__(self, agent: PrefillAgent | DecodeAgent) -> None:
        self.agent = agent
        self._thread = threading.Thread(target=agent.run, name="agent")
        self._thread.start()

    def end(self) -> None:
        """Stop without draining, wait, close. Calling it again does nothing."""
        if self._thread.is_alive():
            self.agent.stop()
            self.agent.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the agent did not stop"
        self.agent.close()


class Seat:
    """A worker with a poisoned pool; `connect` hands it over to the agent at `socket_dir`."""

    def __init__(self, socket_dir: Path, layout: PoolLayout, rng: random.Random) -> None:
        self.socket_dir = socket_dir
        self.layout = layout
        num_bytes = max(group.extent_bytes for group in layout.groups) + GUARD_BYTES
        self.memory = HostMemory.create(num_bytes, "pool")
        self.memory.array[:] = POISON
        self.expected: npt.NDArray[np.uint8] = self.memory.array.copy()
        self._rng = rng
        self._free = [set(range(group.num_pages)) for group in layout.groups]

    def take_pages(self, ranges: Sequence[TokenRange]) -> Worker:
        """Free pages of a request with these token ranges, one for each group, shuffled."""
        empty = [np.empty(0, dtype=np.int64) for _ in ranges]
        request = Worker(self.layout, self.expected, tuple(ranges), tuple(empty))
        pages = []
        for idx, group in enumerate(self.layout.groups):
            rows = request.rows_of(idx)
            held = sorted({row // group.page_tokens for token, row in rows.items() if token >= ranges[idx].first})
            chosen = self._rng.sample(sorted(self._free[idx]), len(held))
            self._free[idx] -= set(chosen)
            pages.append(np.array(chosen, dtype=np.int64))
        return Worker(self.layout, self.expected, tuple(ranges), tuple(pages))

    def close(self) -> None:
        self.memory.close()


def write_rows(pool: npt.NDArray[np.uint8], request: Worker, salt: int, have: Sequence[TokenRange] = ()) -> None:
    """Put every row of the request into `pool`, each byte xor `salt`, but for the tokens in `have`."""
    for idx, group in enumerate(request.layout.groups):
        for layer in range(group.layers.first, group.layers.end):
            for token, address in request.row_addresses(idx, layer).items():
                is_state = group.placement is Placement.STATE
                if not is_state and any(held.first <= token < held.end for held in have):
                    continue
                shard = request.layout.shard
                value = state_value(group, layer, shard) if is_state else row_value(group, layer, token)
                pool[address : address + group.row_bytes] = value ^ np.uint8(salt)


@dataclass(slots=True)
class Request:
    """One transfer under way."""

    ticket: Ticket
    sources: list[Worker]
    targets: list[Worker]
    salt: int
    have: tuple[TokenRange, ...]
    num_tokens: int
    events: list[TransferEvent] = field(default_factory=list)


class AgentWorld:
    """Prefill and decode seats with their agents and clients. Leaving the block ends all of it.

    `placement`: who moves the rows of all pools, as in `PrefillClient.connect`; `decode_placement` instead of it on
    that side.
    """

    def __init__(
        self,
        path: Path,
        transport: str = "loopback",
        seed: int = 0,
        placement: PoolPlacement | None = None,
        decode_placement: PoolPlacement | None = None,
    ) -> None:
        self.path = path
        self.placement = placement
        self.decode_placement = decode_placement
        self.transport = transport
        self.prefill: list[tuple[Seat, PrefillClient]] = []
        self.decode: list[tuple[Seat, DecodeClient]] = []
        self.threads: dict[Path, AgentThread] = {}
        self._rng = random.Random(seed)
        self._stack = ExitStack()
        self.as_handed: Callable[[HostMemory], PoolMemory] = lambda memory: memory
        """What workers hand over in place of their memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- agents ----

    def start_prefill(self, name: str, num_slots: int = 4, **fields: Any) -> PrefillAgent:  # noqa: ANN401
        """Start a prefill agent at the socket directory `name`, in mode packed unless `fields` say otherwise."""
        config = PrefillConfig(
            socket_dir=str(self.path / name),
            transport=self._transport(fields),
            slots=self._slots(num_slots, fields),
            mode="packed",
        )
        agent = PrefillAgent(msgspec.structs.replace(config, **fields))
        self._run(name, agent)
        return agent

    def start_decode(self, name: str, rank: int = 0, world: int = 1, num_slots: int = 4, **fields: Any) -> DecodeAgent:  # noqa: ANN401
        """Start decode agent `rank` of `world` at the socket directory `name`."""
        config = DecodeConfig(
            socket_dir=str(self.path / name),
            dst_rank=rank,
            dst_world=world,
            transport=self._transport(fields),
            slots=self._slots(num_slots, fields),
        )
        agent = DecodeAgent(msgspec.structs.replace(config, **fields))
        self._run(name, agent)
        return agent

    def _transport(self, fields: dict[str, Any]) -> TransportConfig:
        return TransportConfig(name=self.transport, options=fields.pop("options", {}))  # type: ignore[arg-type]

    def _slots(self, num_slots: int, fields: dict[str, Any]) -> SlotConfig:
        return SlotConfig(num_slots=num_slots, slot_bytes=fields.pop("slot_bytes", SLOT_BYTES))

    def _run(self, name: str, agent: PrefillAgent | DecodeAgent) -> None:
        thread = AgentThread(agent)
        self._stack.callback(thread.end)
        self.threads[self.path / name] = thread

    def end_agent(self, name: str) -> None:
        self.threads[self.path / name].end()

    # ---- workers ----

    def join_prefill(self, name: str, layout: PoolLayout) -> tuple[Seat, PrefillClient]:
        """A prefill worker attaches to the agent at `name`."""
        seat = self._seat(name, layout)
        pool = self.as_handed(seat.memory)
        client = PrefillClient.connect(seat.socket_dir, pool, layout, placement=self.placement, timeout_s=WAIT_S)
        self._stack.callback(client.close)
        self.prefill.append((seat, client))
        return seat, client

    def join_decode(self, name: str, layout: PoolLayout) -> tuple[Seat, DecodeClient]:
        """A decode worker attaches to the agent at `name`."""
        seat = self._seat(name, layout)
        placement = self.decode_placement or self.placement
        pool = self.as_handed(seat.memory)
        client = DecodeClient.connect(seat.socket_dir, pool, layout, placement=placement, timeout_s=WAIT_S)
        self._stack.callback(client.close)
        self.decode.append((seat, client))
        return seat, client

    def _seat(self, name: str, layout: PoolLayout) -> Seat:
        seat = Seat(self.path / name, layout, self._rng)
        self._stack.callback(seat.close)
        return seat

    # ---- transfers ----

    def ranges(self, layout: PoolLayout, first: int, end: int) -> list[TokenRange]:
        """Tokens `[first, end)` in every group; a state blob has its own range."""
        state = TokenRange(0, 1)
        tokens = TokenRange(first, end)
        return [state if group.placement is Placement.STATE else tokens for group in layout.groups]

    def begin(
        self,
        num_tokens: int,
        *,
        salt: int = 0,
        first: int = 0,
        have: tuple[TokenRange, ...] = (),
        deadline_s: float = 60.0,
    ) -> Request:
        """Write the source rows, take a ticket, open it at every decode worker for `[first, num_tokens)`."""
        sources = []
        for seat, _ in self.prefill:
            request = seat.take_pages(self.ranges(seat.layout, 0, num_tokens))
            write_rows(seat.memory.array, request, salt)
            sources.append(request)
        home = self.prefill[0][1]
        siblings = [client.source for _, client in self.prefill[1:]]
        ticket = home.ticket(sources=siblings, deadline_s=deadline_s)
        targets = [seat.take_pages(self.ranges(seat.layout, first, num_tokens)) for seat, _ in self.decode]
        for (_, client), target in zip(self.decode, targets, strict=True):
            client.open(ticket, receive_pages(target, have), deadline_s=deadline_s)
        return Request(ticket, sources, targets, salt, have, num_tokens)

    def submit(self, request: Request, first: int, end: int, *, aux: bytes = b"") -> None:
        """Submit tokens `[first, end)` at every prefill worker; the transfer's last chunk ends at `num_tokens`."""
        for (_, client), source in zip(self.prefill, request.sources, strict=True):
            groups = chunk_pages(source, first, end)
            client.submit(request.ticket, groups, last=end == request.num_tokens, aux=aux)

    def submit_all(self, request: Request, chunk_tokens: int) -> None:
        bounds = [*range(0, request.num_tokens, chunk_tokens), request.num_tokens]
        if request.num_tokens == 0:
            bounds = [0, 0]
        for first, end in itertools.pairwise(bounds):
            self.submit(request, first, end, aux=b"aux %d" % end)

    def finish(self, request: Request) -> None:
        """Wait for both sides; every worker hears of a good end, and its rows are expected from now on."""
        for (seat, client), target in zip(self.decode, request.targets, strict=True):
            event = self.wait(client, request)
            assert event.event is EventKind.LANDED, event
            request.events.append(event)
            write_rows(seat.expected, target, request.salt, request.have)
        for _, prefill_client in self.prefill:
            event = self.wait(prefill_client, request)
            assert event.event is EventKind.SENT, event
            request.events.append(event)

    def wait(self, client: PrefillClient | DecodeClient, request: Request) -> TransferEvent:
        """The terminal event of the request at one client, while the others, as engines do, look in now and then."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                return client.wait(request.ticket, WAIT_S if self.placement is None else _STEP_S)
            except ControlTimeoutError:
                if time.monotonic() >= deadline_s:
                    raise
            for _, other in (*self.prefill, *self.decode):
                other._link.drain()

    def move(self, num_tokens: int, *, chunk_tokens: int = 1 << 20, salt: int = 0, **fields: Any) -> Request:  # noqa: ANN401
        """A whole transfer that goes well, verified."""
        request = self.begin(num_tokens, salt=salt, **fields)
        self.submit_all(request, chunk_tokens)
        self.finish(request)
        self.verify()
        return request

    def move_two_at_once(self) -> None:
        """Two transfers whose chunks are submitted in turn; rows of the two differ in every byte."""
        first, second = self.begin(60, salt=1), self.begin(45, salt=2)
        for start in range(0, 60, 15):
            self.submit(first, start, start + 15)
            if start < 45:
                self.submit(second, start, start + 15)
        self.finish(second)
        self.finish(first)
        self.verify()

    def verify(self) -> None:
        """Every byte of every decode worker's pool is what it must be."""
        for idx, (seat, _) in enumerate(self.decode):
            wrong = np.flatnonzero(seat.memory.array != seat.expected)
            assert wrong.size == 0, f"decode worker {idx}: {wrong.size} bytes differ, the first at {wrong[0]}"


def receive_pages(request: Worker, have: tuple[TokenRange, ...] = ()) -> dict[str, ReceivePages]:
    """The request's pages as `DecodeClient.open` takes them."""
    pages = {}
    for group, tokens, ids in zip(request.layout.groups, request.ranges, request.pages, strict=True):
        held = () if group.placement is Placement.STATE else tuple((each.first, each.end) for each in have)
        pages[group.name] = ReceivePages(tokens.first, tokens.end, ids, held)
    return pages


def chunk_pages(request: Worker, first: int, end: int) -> dict[str, ChunkPages]:
    """The pages of tokens `[first, end)` as `PrefillClient.submit` takes them; state goes with the first chunk."""
    pages = {}
    for idx, group in enumerate(request.layout.groups):
        if group.placement is Placement.STATE:
            if first == 0:
                pages[group.name] = ChunkPages(0, 1, request.pages[idx])
            continue
        pages[group.name] = ChunkPages(first, end, request.table(idx, TokenRange(first, end)).pages)
    return pages
