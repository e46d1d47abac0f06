"""The decode agent: performs what its core asks for, beside a decode worker. It never listens to the network."""

from __future__ import annotations

import time
from functools import partial

from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    Message,
    Ok,
    Open,
    RejectTicket,
    WorkerReply,
)
from kvxfer.control.peer_channel import load_credentials
from kvxfer.decode.actions import Notify, PairWith, PreparePull, Pull, Scatter, SendToPeer
from kvxfer.decode.core import SHUTDOWN_DETAIL, DecodeCore
from kvxfer.decode.links import SourceLinks
from kvxfer.errors import IntegrityError, RefusedError, TransportError
from kvxfer.integrity import check_segment, check_sum, expected_sum
from kvxfer.layout import PoolLayout, Shard
from kvxfer.operations import Move, PeerRows, RowSum, failed
from kvxfer.ops.config import DecodeConfig
from kvxfer.ops.figures import AgentFigures
from kvxfer.ops.turns import TurnWatch
from kvxfer.sidecar import Sidecar
from kvxfer.slots import LANDING_MOVES, SlotTable
from kvxfer.transfer import Reason


class DecodeAgent:
    """One decode agent. `incarnation` is the id of this run; `endpoint` is empty: it connects, it does not listen."""

    endpoint = ""

    def __init__(self, config: DecodeConfig) -> None:
        """Listen for the worker, make the slots, start the engine. Raises `ConfigError`, `EngineMissingError`,
        `TransportError`."""
        credentials = load_credentials(config.security.key_file, config.security.allowed_keys_file)
        self._config = config
        self._verify = config.verify == "full"
        self._sidecar = Sidecar(
            self,
            role="decode",
            socket_dir=config.socket_dir,
            host=config.listen_host,
            transport=config.transport,
            slots=config.slots,
            ops=config.ops,
            num_threads=config.num_threads,
            drain_s=config.drain_s,
            checks_segments=self._verify,
        )
        self.incarnation = self._sidecar.incarnation
        self._core = DecodeCore(SlotTable(config.slots.num_slots, LANDING_MOVES), config.credits_per_leg)
        self._core.slots_lie_in(self._sidecar.region.region_id)
        self.public_key = credentials.keys.public
        self._links = SourceLinks(config, credentials, self._sidecar, self._core)
        self._turns = TurnWatch(config.slots.num_slots, config.slots.slot_bytes, self._sidecar.log)
        self.ops = self._sidecar.ops
        self.ops.serve(self.figures)

    def run(self) -> None:
        """Serve until `stop()` and until what is open then has ended or `drain_s` has passed; then end the rest and
        say goodbye."""
        self._sidecar.run()
        now = time.monotonic()
        self._core.fail_all(Reason.SHUTDOWN, SHUTDOWN_DETAIL, now)
        self.perform(now)
        self._links.lose_all(Reason.SHUTDOWN, SHUTDOWN_DETAIL, now)
        self.perform(now)

    def stop(self) -> None:
        """Drain, then end `run()`; called again, end it at once. For signal handlers and other threads."""
        self._sidecar.stop()

    def figures(self) -> AgentFigures:
        """What the metrics show. May be called from another thread."""
        sidecar = self._sidecar
        return AgentFigures(
            side="decode",
            transport=sidecar.transport.name,
            core=self._core.figures(),
            engine=sidecar.transport.counters,
            paths=self._links.paths(),
            has_worker=sidecar.pool is not None,
            gpu_turn_s=sidecar.desk.seat.gpu_turn_s,
            num_slots_wanted=self._turns.num_wanted,
        )

    def close(self) -> None:
        """Give everything back."""
        self._links.close()
        self._sidecar.close()

    # ---- the worker ----

    def worker_attached(self, layout: PoolLayout, now: float) -> WorkerReply:
        """A worker has handed over its pool; peers that were paired for another one must be paired anew."""
        self._core.check_admission()
        self._check_shard(layout.shard)
        self._links.lose_all(Reason.PEER_LOST, "a new worker has attached", now)
        self._core.attach_worker(layout)
        return Attached(incarnation=self.incarnation)

    def _check_shard(self, shard: Shard) -> None:
        """Agents are numbered by the shards that their workers hold, so that together they hold every row."""
        rank, world = self._config.dst_rank, self._config.dst_world
        if world % shard.size or rank % shard.size != shard.rank:
            raise RefusedError(
                f"got rank {shard.rank} of {shard.size}, expected rank {rank % shard.size} of a size that divides "
                f"dst_world {world}: agent dst_rank {rank} serves the worker that holds shard dst_rank % shard.size",
                field="layout.shard",
            )

    def worker_lost(self, now: float) -> None:
        """The worker's end was seen."""
        self._core.worker_lost(now)
        self.perform(now)
        self._links.lose_all(Reason.WORKER_LOST, "the decode worker is gone", now)

    def worker_request(self, message: Message, now: float) -> WorkerReply:
        """Opens and aborts."""
        match message:
            case Open():
                self._core.open(message, now)
                return Ok()
            case RejectTicket():
                self._core.reject(message, now)
                return Ok()
            case AbortTransfer():
                self._core.abort(message.transfer, now)
                return Ok()
            case _:
                raise RefusedError(f"a decode agent does not serve {type(message).__name__}")

    def begin_drain(self, now: float) -> None:  # noqa: ARG002 - what was accepted may go on until its end
        """The agent was told to stop."""
        self._core.is_draining = True

    def is_drained(self) -> bool:
        """Whether every transfer has ended and its legs are closed."""
        return not self._core.receives

    def is_pool_quiet(self) -> bool:
        """Whether nothing writes the worker's pool."""
        return self._core.num_touching_pool == 0

    # ---- actions and their ends ----

    def tick(self, now: float) -> None:
        """Deadlines, peers, and slots that only other memory can free."""
        self._links.tick(now)
        self._turns.look(self._sidecar.desk.seat.gpu_turn_s, self._links.bytes_per_s)
        self._core.tick(now)
        if self._core.may_renew_slots:
            self._renew_slots(now)

    def share_slots_by_fd(self, now: float) -> None:
        """`WorkerAgent.share_slots_by_fd`."""
        self._renew_slots(now, has_fd=True)

    def _renew_slots(self, now: float, *, has_fd: bool = False) -> None:
        """Take other memory for the landing slots and tell every peer, before any credit for it goes out."""
        try:
            self._sidecar.renew_slots(has_fd=has_fd)
        except (TransportError, OSError):
            self._sidecar.log.exception("cannot give the slots other memory")
            return
        if self._sidecar.must_rotate:
            try:
                self._sidecar.rotate()
            except TransportError:  # the next move of the slots tries again first
                self._sidecar.log.exception("cannot replace the engine: the slots' old memory stays taken")
        self._links.renew_region(now)
        self._core.slots_lie_in(self._sidecar.region.region_id)
        self._core.rotated()

    def perform(self, now: float) -> None:
        """Do what the core asks for, and what follows from it."""
        while (actions := self._core.take_actions()) or self._links.flush(now):
            for action in actions:
                match action:
                    case SendToPeer():
                        self._links.send(action.peer, action.message)
                    case Notify():
                        self._links.flush(now)  # peers first: nobody tells them if this agent dies now
                        self._sidecar.notify(action.event)
                    case PairWith():
                        self._links.pair(action.source, now)
                    case Scatter():
                        self._scatter(action)
                    case PreparePull():
                        self._prepare_pull(action)
                    case Pull():
                        self._pull(action, now)
        if self._sidecar.pool is not None and self._sidecar.rows.has_timeline:
            # A stream of the worker prepares for what has been announced, and drops what it has prepared for in vain.
            self._sidecar.rows.expect(self._core.num_moves_to_come, 0)

    def _scatter(self, scatter: Scatter) -> None:
        operation, notice, source, cancel = scatter
        sidecar = self._sidecar
        rows = sidecar.rows
        try:
            sidecar.slots.flush()
        except TransportError as error:
            sidecar.mover.report(failed(operation, notice.segment, error))
            return
        look = row_sum = None
        expected = expected_sum(notice) if notice.checksum and rows.checks_scatters else None
        if expected is not None:
            row_sum = RowSum(partial(check_sum, notice), notice.num_bytes, expected)  # as many as were planned
        elif self._verify or notice.checksum:
            look = partial(self._check, scatter)
        sidecar.trace.begin("scatter", operation, notice.slot, notice.segment)
        rows.scatter(Move(operation, source, notice.segment, cancel, row_sum), notice.slot, look)

    def _check(self, scatter: Scatter) -> None:
        """Raise `IntegrityError` unless the segment has arrived as it was packed."""
        if self._sidecar.slots.is_on_gpu:
            raise IntegrityError(
                "a segment on a GPU: got a checksum that no stream compares, expected a sum made by a stream that "
                "gathers (placement worker) where verify is full, else none"
            )
        check_segment(scatter.notice, self._sidecar.slots.view(scatter.slot))

    def _prepare_pull(self, prepare: PreparePull) -> None:
        pool = self._links.source_pool(prepare.peer)
        if pool is not None:
            src = PeerRows(pool.index, pool.num_bytes, prepare.src_addresses)
            self._sidecar.rows.prepare_pull(prepare.source, src)

    def _pull(self, pull: Pull, now: float) -> None:
        pool = self._links.source_pool(pull.peer)
        if pool is None or pool.leases is None:
            self._core.scatter_ended(pull.operation, now, 0.0, "the source's pool is not mapped any more")
            return
        src = PeerRows(pool.index, pool.num_bytes, pull.src_addresses)
        move = Move(pull.operation, pull.source, 0, pull.cancel)
        self._sidecar.trace.begin("scatter", pull.operation, None, 0)
        self._sidecar.rows.pull(move, src, partial(pool.leases.check, pull.lease))

    def poll(self, now: float) -> None:
        """See which moves have ended."""
        for moved in self._sidecar.poll_moves():
            self._sidecar.trace.end("scatter", moved.operation, moved.busy_s)
            self._core.scatter_ended(moved.operation, now, moved.busy_s, moved.error, is_corrupt=moved.is_corrupt)
