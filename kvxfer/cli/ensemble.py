"""The cast of a demo or bench: one prefill worker and N decode workers, each with its agent."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.cli import protocol
from kvxfer.cli.harness import Cast, Child, ChildError, wait_ready
from kvxfer.control.messages import TransferStats
from kvxfer.layout import PoolLayout
from kvxfer.ops.config import DecodeConfig, PrefillConfig, SlotConfig, TransferMode, TransportConfig, TransportName
from kvxfer.transfer import EventKind

DEADLINE_S = 120.0
_COMMAND_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Setup:
    """How the agents of a run are configured."""

    transport: TransportName
    mode: TransferMode
    num_ranks: int
    src_slots: SlotConfig
    dst_slots: SlotConfig


@dataclass(frozen=True, slots=True)
class Pool:
    """A worker's pool."""

    layout: PoolLayout
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer that ended well. `elapsed_s` runs from the first open or submit to the last `landed`."""

    elapsed_s: float
    sent: TransferStats
    landed: tuple[TransferStats, ...]
    landed_s: tuple[float, ...]
    """Of each rank, from the start of its open to its `landed`."""


class Ensemble:
    """Starts all processes; `Cast` ends them."""

    def __init__(self, cast: Cast, setup: Setup) -> None:
        """Returns when every agent is ready. Raises `ChildError` where one does not come up."""
        self._cast = cast
        self.setup = setup
        transport = TransportConfig(name=setup.transport)
        prefill_agent = cast.start_agent(
            "prefill-agent",
            PrefillConfig(
                socket_dir=cast.socket_dir("prefill-agent"), transport=transport, slots=setup.src_slots, mode=setup.mode
            ),
        )
        self._decode_names = [f"decode-agent-{rank}" for rank in range(setup.num_ranks)]
        decode_agents = [
            cast.start_agent(
                name,
                DecodeConfig(
                    socket_dir=cast.socket_dir(name),
                    dst_rank=rank,
                    dst_world=setup.num_ranks,
                    transport=transport,
                    slots=setup.dst_slots,
                    credits_per_leg=min(4, setup.dst_slots.num_slots),
                ),
            )
            for rank, name in enumerate(self._decode_names)
        ]
        self.prefill = cast.start_worker("prefill-worker", "kvxfer.cli.prefill_worker")
        self.decode = [
            cast.start_worker(f"decode-worker-{rank}", "kvxfer.cli.decode_worker") for rank in range(setup.num_ranks)
        ]
        wait_ready([prefill_agent, *decode_agents])

    def hand_over(self, src: Pool, dst: list[Pool], fill: int) -> None:
        """Let every worker create its pool, all bytes `fill`, and hand it to its agent."""
        socket_dirs = [self._cast.socket_dir(name) for name in ("prefill-agent", *self._decode_names)]
        workers = [self.prefill, *self.decode]
        for worker, socket_dir, pool in zip(workers, socket_dirs, [src, *dst], strict=True):
            worker.send(
                protocol.HandOver(socket_dir=socket_dir, layout=pool.layout, pool_bytes=pool.num_bytes, fill=fill)
            )
        for worker in workers:
            worker.receive(protocol.Done, _COMMAND_TIMEOUT_S)

    def move(self, chunks: list[protocol.Chunk], receive: list[dict[str, protocol.PageList]], aux: bytes = b"") -> Move:
        """One transfer: decode ranks open and the prefill worker submits at the same time.

        Raises `ChildError` where it does not end with `sent` and `landed` everywhere.
        """
        ticket = self.prefill.ask(
            protocol.MakeTicket(deadline_s=DEADLINE_S), protocol.TicketText, _COMMAND_TIMEOUT_S
        ).text
        for worker, groups in zip(self.decode, receive, strict=True):
            worker.send(protocol.Receive(ticket=ticket, groups=groups, deadline_s=DEADLINE_S))
        self.prefill.send(protocol.SendChunks(ticket=ticket, chunks=chunks, aux=aux, deadline_s=DEADLINE_S))
        landed = [_ended(worker, EventKind.LANDED) for worker in self.decode]
        sent = _ended(self.prefill, EventKind.SENT)
        start_s = min(each.start_s for each in (*landed, sent))
        return Move(
            elapsed_s=max(each.end_s for each in landed) - start_s,
            sent=sent.event.stats,
            landed=tuple(each.event.stats for each in landed),
            landed_s=tuple(each.end_s - each.start_s for each in landed),
        )

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


def _ended(worker: Child, wanted: EventKind) -> protocol.Ended:
    reply = worker.receive(protocol.Ended, _COMMAND_TIMEOUT_S)
    if reply.event.event is not wanted:
        reason = reply.event.reason.value if reply.event.reason else "no reason"
        raise ChildError(
            f"{worker.name}: the transfer ended as {reply.event.event.value} ({reason}), expected {wanted.value}: "
            f"{reply.event.detail}"
        )
    return reply
