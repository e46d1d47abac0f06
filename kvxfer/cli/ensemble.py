"""The cast of a demo or bench: one prefill worker and N decode workers, each with its agent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvxfer.cli import protocol
from kvxfer.cli.harness import Cast, ChildError, Line, ThreadsTime, wait_ready
from kvxfer.control.messages import TransferEvent, TransferStats
from kvxfer.layout import PoolLayout
from kvxfer.ops.config import (
    DecodeConfig,
    OpsConfig,
    PrefillConfig,
    SlotConfig,
    TransferMode,
    TransportConfig,
    TransportName,
    Verify,
)
from kvxfer.transfer import EventKind

DEADLINE_S = 120.0
_COMMAND_TIMEOUT_S = 300.0
_COMPUTE_ALONE_S = 0.3
MAX_COPY_PROCESSES = 12


@dataclass(frozen=True, slots=True)
class Wire:
    """An emulated wire: the transport `loopback` holds each write for as long as this wire would.

    It belongs to the prefill agent, so the legs to all ranks share it.
    """

    bytes_per_s: float
    descriptor_s: float

    def options(self) -> dict[str, int | float | str | bool]:
        """Options of the transport. Copying must not hold the wire up: a process copies 4 to 10 GB/s."""
        num_copy_processes = max(1, min(MAX_COPY_PROCESSES, (os.cpu_count() or 1) * 3 // 4))
        return {
            "wire_bytes_per_s": self.bytes_per_s,
            "descriptor_s": self.descriptor_s,
            "num_copy_processes": num_copy_processes,
        }


@dataclass(frozen=True, slots=True)
class Setup:
    """How the agents of a run are configured, and where the pools of their workers lie."""

    transport: TransportName
    mode: TransferMode
    num_ranks: int
    src_slots: SlotConfig
    dst_slots: SlotConfig
    wire: Wire | None = None
    device: protocol.Device = "cpu"
    placement: protocol.RowPlacement = "agent"
    verify: Verify = "off"
    num_gpus: int = 1
    trace_dir: str = ""
    """Where each agent notes what it does when, in a file of its name; empty: nowhere."""

    def dst_slots_of(self, rank: int) -> SlotConfig:
        """Slots of a decode agent: on the GPU of its worker, or in host memory."""
        if self.dst_slots.kind != "device":
            return self.dst_slots
        return msgspec.structs.replace(self.dst_slots, gpu=gpu_of_rank(rank, self.num_gpus))

    def ops(self, agent: str) -> OpsConfig:
        """Of the agent of this name."""
        return OpsConfig(trace_file=str(Path(self.trace_dir, agent)) if self.trace_dir else "")


@dataclass(frozen=True, slots=True)
class Pool:
    """A worker's pool."""

    layout: PoolLayout
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Pace:
    """How a prefill worker submits. With `opens_first` the ranks have opened before the clock starts. A transfer that
    has not ended after `deadline_s` fails."""

    interval_s: float = 0.0
    busy: protocol.Busy = "none"
    opens_first: bool = False
    deadline_s: float = DEADLINE_S


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer that ended well. `elapsed_s` runs from the first submit, or the first open if that is timed and
    came before, to the last `landed`; `tail_s` from the last submit."""

    elapsed_s: float
    tail_s: float
    sent: TransferStats
    landed: tuple[TransferStats, ...]
    landed_s: tuple[float, ...]
    """Of each rank, from the start of its open to its `landed`."""
    client_cpu_s: float = 0.0
    """Processor time of the prefill worker inside its client."""
    decode_client_cpu_s: tuple[float, ...] = ()
    products_per_s: float = 0.0
    device_bytes: int = 0
    start_s: float = 0.0
    """On the host's monotonic clock."""
    agent_cpu: tuple[ThreadsTime, ...] = ()
    """Processor time of the prefill agent and of each decode agent, from the ticket to the last `landed`."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a run. They outlive agents: an ensemble takes as many decode workers as it has ranks."""

    prefill: Line
    decode: list[Line]


def gpu_of_rank(rank: int, num_gpus: int) -> int:
    """Where the pool of a decode rank lies, if that of the prefill worker lies on GPU 0: on another one, where there is
    one, so that every row crosses the link between GPUs."""
    return 1 + rank % (num_gpus - 1) if num_gpus > 1 else 0


def start_workers(cast: Cast, num_ranks: int, *, num_gpus: int | None) -> Workers:
    """One prefill worker and `num_ranks` decode workers: a process each, or, where they are to share `num_gpus` GPUs,
    one for all that have a GPU in common."""
    names = [f"decode-worker-{rank}" for rank in range(num_ranks)]
    if num_gpus is None:
        prefill = cast.start_worker("prefill-worker", "kvxfer.cli.prefill_worker")
        return Workers(prefill, [cast.start_worker(name, "kvxfer.cli.decode_worker") for name in names])
    crews: list[dict[str, str]] = [{} for _ in range(num_gpus)]
    crews[0]["prefill-worker"] = "prefill"
    for rank, name in enumerate(names):
        crews[gpu_of_rank(rank, num_gpus)][name] = "decode"
    lines: dict[str, Line] = {}
    for device_index, roles in enumerate(crews):
        if roles:
            # A stream of each worker waits on the GPU for orders: with fewer connections one could hold up another.
            crew = cast.start_crew(f"workers-{device_index}", roles, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
            lines |= zip(roles, crew.members, strict=True)
    return Workers(lines["prefill-worker"], [lines[name] for name in names])


class Ensemble:
    """Starts all processes; `Cast` ends them."""

    def __init__(self, cast: Cast, setup: Setup, workers: Workers | None = None) -> None:
        """Returns when every agent is ready; `workers` have none. Raises `ChildError` where one does not come up."""
        self._cast = cast
        self.setup = setup
        if workers is None:
            num_gpus = setup.num_gpus if setup.device == "cuda" else None
            workers = start_workers(cast, setup.num_ranks, num_gpus=num_gpus)
        self.prefill = workers.prefill
        self.decode = workers.decode[: setup.num_ranks]
        transport = TransportConfig(name=setup.transport)
        src_transport = TransportConfig(name=setup.transport, options=setup.wire.options() if setup.wire else {})
        prefill = PrefillConfig(
            socket_dir=cast.socket_dir("prefill-agent"),
            transport=src_transport,
            slots=setup.src_slots,
            ops=setup.ops("prefill-agent"),
            mode=setup.mode,
        )
        self._decode_names = [f"decode-agent-{rank}" for rank in range(setup.num_ranks)]
        self._agents = [cast.start_agent("prefill-agent", prefill)]
        self._agents += [
            cast.start_agent(
                name,
                DecodeConfig(
                    socket_dir=cast.socket_dir(name),
                    dst_rank=rank,
                    dst_world=setup.num_ranks,
                    transport=transport,
                    slots=setup.dst_slots_of(rank),
                    ops=setup.ops(name),
                    credits_per_leg=min(4, setup.dst_slots.num_slots),
                    verify=setup.verify,
                ),
            )
            for rank, name in enumerate(self._decode_names)
        ]
        wait_ready(self._agents)

    def hand_over(self, src: Pool, dst: list[Pool], fill: int) -> None:
        """Let every worker create its pool, all bytes `fill`, and hand it to its agent."""
        names = ("prefill-agent", *self._decode_names)
        places = (0, *(gpu_of_rank(rank, self.setup.num_gpus) for rank in range(self.setup.num_ranks)))
        commands = [
            protocol.HandOver(
                socket_dir=self._cast.socket_dir(name),
                layout=pool.layout,
                pool_bytes=pool.num_bytes,
                fill=fill,
                device=self.setup.device,
                device_index=device_index,
                placement=self.setup.placement,
            )
            for name, pool, device_index in zip(names, [src, *dst], places, strict=True)
        ]
        self.prefill.send(commands[0])
        if self.setup.device == "cuda":
            # The first of the process compiles the kernel; together they would all do so.
            self.prefill.receive(protocol.Done, _COMMAND_TIMEOUT_S)
        for worker, command in zip(self.decode, commands[1:], strict=True):
            worker.send(command)
        if self.setup.device == "cpu":
            self.prefill.receive(protocol.Done, _COMMAND_TIMEOUT_S)
        for worker in self.decode:
            worker.receive(protocol.Done, _COMMAND_TIMEOUT_S)

    def let_go(self) -> None:
        """Let the workers leave their agents and free their pools."""
        for worker in (self.prefill, *self.decode):
            worker.send(protocol.LetGo())
        for worker in (self.prefill, *self.decode):
            worker.receive(protocol.Done, _COMMAND_TIMEOUT_S)

    def move(
        self,
        chunks: list[protocol.Chunk],
        receive: list[dict[str, protocol.PageList]],
        aux: bytes = b"",
        pace: Pace = Pace(),
    ) -> Move:
        """One transfer: decode ranks open and the prefill worker submits, at the same time unless `pace` says other.

        Raises `ChildError` where it does not end with `sent` and `landed` everywhere.
        """
        began = [agent.processor_s() for agent in self._agents]
        ticket = self.prefill.ask(
            protocol.MakeTicket(deadline_s=pace.deadline_s), protocol.TicketText, _COMMAND_TIMEOUT_S
        ).text
        for worker, groups in zip(self.decode, receive, strict=True):
            worker.send(protocol.Open(ticket=ticket, groups=groups, deadline_s=pace.deadline_s))
            worker.send(protocol.AwaitEnd(ticket=ticket, timeout_s=pace.deadline_s + 5.0))
        command = protocol.SendChunks(
            ticket=ticket,
            chunks=chunks,
            aux=aux,
            deadline_s=pace.deadline_s,
            interval_s=pace.interval_s,
            busy=pace.busy,
        )
        if not pace.opens_first:
            self.prefill.send(command)
        opened = [worker.receive(protocol.Opened, _COMMAND_TIMEOUT_S) for worker in self.decode]
        if pace.opens_first:
            self.prefill.send(command)
        landed = [worker.receive(protocol.Ended, _COMMAND_TIMEOUT_S) for worker in self.decode]
        for worker, ended in zip(self.decode, landed, strict=True):
            _check(worker, ended.event, EventKind.LANDED)
        sent = self.prefill.receive(protocol.Sent, _COMMAND_TIMEOUT_S)
        _check(self.prefill, sent.event, EventKind.SENT)
        starts_s = [sent.start_s] if pace.opens_first else [sent.start_s, *(each.start_s for each in opened)]
        end_s = max(each.end_s for each in landed)
        return Move(
            elapsed_s=end_s - min(starts_s),
            tail_s=end_s - sent.last_submit_s,
            sent=sent.event.stats,
            landed=tuple(each.event.stats for each in landed),
            landed_s=tuple(end.end_s - begin.start_s for begin, end in zip(opened, landed, strict=True)),
            client_cpu_s=sent.client_cpu_s,
            decode_client_cpu_s=tuple(
                begin.client_cpu_s + end.client_cpu_s for begin, end in zip(opened, landed, strict=True)
            ),
            products_per_s=sent.products_per_s,
            device_bytes=sent.device_bytes,
            start_s=min(starts_s),
            agent_cpu=tuple(agent.processor_s().since(at) for agent, at in zip(self._agents, began, strict=True)),
        )

    def compute_alone(self, busy: protocol.Busy) -> float:
        """Products a second of the prefill worker while nothing moves."""
        command = protocol.Compute(busy=busy, duration_s=_COMPUTE_ALONE_S)
        return self.prefill.ask(command, protocol.Computed, _COMMAND_TIMEOUT_S).products_per_s

    def refill(self, fill: int) -> None:
        """Overwrite all decode pools with the byte `fill`."""
        for worker in self.decode:
            worker.send(protocol.Refill(fill=fill))
        for worker in self.decode:
            worker.receive(protocol.Done, _COMMAND_TIMEOUT_S)

    def verify(self, expected: list[dict[str, protocol.Expected]]) -> list[str]:
        """Let every decode worker compare every byte of its pool; what each found, empty if all is right."""
        for worker, groups in zip(self.decode, expected, strict=True):
            worker.send(protocol.Verify(groups=groups))
        return [worker.receive(protocol.Verified, _COMMAND_TIMEOUT_S).problem for worker in self.decode]


def _check(worker: Line, event: TransferEvent, wanted: EventKind) -> None:
    if event.event is not wanted:
        reason = event.reason.value if event.reason else "no reason"
        raise ChildError(
            f"{worker.name}: the transfer ended as {event.event.value} ({reason}), expected {wanted.value}: "
            f"{event.detail}"
        )
