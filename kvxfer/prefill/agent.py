"""The prefill agent: performs what its core asks for, beside a prefill worker."""

from __future__ import annotations

import time
from functools import partial

from kvxfer.control.ids import new_id
from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    Message,
    NewTicket,
    Ok,
    Source,
    Submit,
    Ticket,
    TicketMade,
    WorkerReply,
)
from kvxfer.control.peer_channel import PeerListener, load_credentials
from kvxfer.errors import RefusedError, TransportError
from kvxfer.integrity import digest, sum_digest
from kvxfer.layout import PoolLayout
from kvxfer.operations import Move, RowSum
from kvxfer.ops.config import PrefillConfig
from kvxfer.ops.figures import AgentFigures
from kvxfer.ops.turns import TurnWatch
from kvxfer.prefill.actions import Gather, Notify, SendToPeer, Write
from kvxfer.prefill.admission import SHUTDOWN_DETAIL
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.leg import Mode
from kvxfer.prefill.links import PeerLinks
from kvxfer.prefill.pull_server import PullServer
from kvxfer.prefill.raw_pool import RawPool
from kvxfer.prefill.writes import Writes
from kvxfer.sidecar import Sidecar
from kvxfer.slots import SENDER_MOVES, SlotTable
from kvxfer.transfer import Reason

_ROTATE_EVERY_S = 5.0
_LATE_OPENS_S = 2.0  # a router hands a ticket on, and a decode worker opens it, within this time


class PrefillAgent:
    """One prefill agent. `endpoint` is where decode agents reach it, `incarnation` the id of this run."""

    def __init__(self, config: PrefillConfig) -> None:
        """Listen, make the slots, start the engine. Raises `ConfigError`, `EngineMissingError`, `TransportError`."""
        self._rotate_at = 0.0
        self._must_rotate = False  # before another pool is taken: the engine may still send pages that slots have left
        self._has_fresh_slots = False  # since the worker was lost
        self._listen_until = 0.0  # for those who open tickets that the drain has ended
        self._mode = Mode(config.mode)
        credentials = load_credentials(config.security.key_file, config.security.allowed_keys_file)
        listener = PeerListener(
            config.listen_host,
            config.listen_port,
            credentials,
            allow_wildcard=bool(config.advertise_host),
            advertise_host=config.advertise_host or None,
        )
        try:
            self._sidecar = Sidecar(
                self,
                role="prefill",
                socket_dir=config.socket_dir,
                host=listener.address,
                transport=config.transport,
                slots=config.slots,
                ops=config.ops,
                num_threads=config.num_threads,
                is_target=False,  # peers never write to this side
                drain_s=config.drain_s,
            )
        except BaseException:
            listener.close()
            raise
        self.endpoint = listener.endpoint
        self.public_key = credentials.keys.public
        self.incarnation = self._sidecar.incarnation
        self._pulls = PullServer(config.socket_dir, self._sidecar) if self._mode in (Mode.P2P, Mode.AUTO) else None
        leases = self._pulls.leases if self._pulls is not None else None
        self._core = PrefillCore(SlotTable(config.slots.num_slots, SENDER_MOVES), self._mode, leases)
        pull_path = self._pulls.path if self._pulls is not None else ""
        self._links = PeerLinks(listener, self._sidecar, self._core, config.peer_timeout_s, pull_path)
        self._raw_pool = RawPool(self._sidecar)
        self._writes = Writes(self._sidecar, self._links, self._core, self._raw_pool)
        self._turns = TurnWatch(config.slots.num_slots, config.slots.slot_bytes, self._sidecar.log)
        self._sidecar.wake_on(self._sidecar.transport)
        self.ops = self._sidecar.ops
        self.ops.serve(self.figures)

    def run(self) -> None:
        """Serve until `stop()` and until what is open then has ended or `drain_s` has passed; then end the rest and
        say goodbye."""
        self._sidecar.run()
        now = time.monotonic()
        self._core.fail_all(Reason.SHUTDOWN, SHUTDOWN_DETAIL, now)
        self.perform(now)
        self._links.say_goodbye(now)

    def stop(self) -> None:
        """Drain, then end `run()`; called again, end it at once. For signal handlers and other threads."""
        self._sidecar.stop()

    def figures(self) -> AgentFigures:
        """What the metrics show. May be called from another thread."""
        sidecar = self._sidecar
        return AgentFigures(
            side="prefill",
            transport=sidecar.transport.name,
            core=self._core.figures(),
            engine=sidecar.transport.counters,
            paths=[peer.info.figures.path for peer in list(self._core.peers.values())],
            has_worker=sidecar.pool is not None,
            gpu_turn_s=sidecar.desk.seat.gpu_turn_s,
            num_slots_wanted=self._turns.num_wanted,
            door=self._links.door,
        )

    def close(self) -> None:
        """Give everything back."""
        if self._pulls is not None:
            self._pulls.close()
        self._sidecar.close()
        self._links.close()

    # ---- the worker ----

    def worker_attached(self, layout: PoolLayout, now: float) -> WorkerReply:
        """A worker has handed over its pool; peers that were paired with another one must pair anew."""
        self._core.check_admission()
        self._links.lose_all(Reason.PEER_LOST, now)
        self._has_fresh_slots = False
        self._core.attach_worker(layout, fills_in_turn=self._sidecar.rows.fills_in_turn)
        self._register_pool()
        return Attached(incarnation=self.incarnation, source=self._source())

    def _register_pool(self) -> None:
        """Let the engine read the pool itself, where it can."""
        pool = self._sidecar.pool
        assert pool is not None
        if self._mode is Mode.P2P and pool.for_peers() is None:
            raise RefusedError(
                "mode p2p needs a pool that decode workers of this host can map: make it with allocate_pool(), or from "
                "plain cudaMalloc (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"
            )
        may_send = self._raw_pool.register(pool, is_needed=self._mode is Mode.RAW)
        # What is measured at pairing is the way between slots: it says nothing of one out of a pool on a GPU.
        self._core.allow_raw(may_send=may_send, is_measured=pool.memory is not None)

    def worker_lost(self, now: float) -> None:
        """The worker's end was seen."""
        self._core.worker_lost(now)
        self.perform(now)
        self._links.lose_all(Reason.WORKER_LOST, now)

    def worker_request(self, message: Message, now: float) -> WorkerReply:
        """Tickets, submits, aborts."""
        match message:
            case NewTicket():
                transfer = new_id()
                self._core.new_ticket(transfer, message.deadline_s, now, message.num_decode_groups)
                sources = (self._source(), *message.sources)
                ticket = Ticket(transfer=transfer, sources=sources, num_decode_groups=message.num_decode_groups)
                return TicketMade(ticket=ticket)
            case Submit():
                self._submit(message, now)
                return Ok()
            case AbortTransfer():
                self._core.abort(message.transfer, now)
                return Ok()
            case _:
                raise RefusedError(f"a prefill agent does not serve {type(message).__name__}")

    def _submit(self, submit: Submit, now: float) -> None:
        """Whoever moves the chunk's rows hears of it before the worker has its answer."""
        self._look_at_timeline(now)
        if submit.ready and not self._sidecar.rows.has_timeline:
            raise RefusedError(
                f"submit: ready: got {submit.ready}, expected 0: a pool that the agent maps has no timeline"
            )
        self._core.submit(submit, now)
        self._tell_outlook()

    def begin_drain(self, now: float) -> None:
        """The agent was told to stop."""
        if self._core.begin_drain(now):
            self._listen_until = now + _LATE_OPENS_S

    def is_drained(self) -> bool:
        """Whether every transfer has ended on both sides, and tickets that no decode agent had opened have had their
        time: who opens one of them shall hear why it has ended, and not find nobody there."""
        return not self._core.transfers and time.monotonic() >= self._listen_until

    def is_pool_quiet(self) -> bool:
        """Whether nothing reads the worker's pool, and nothing of the worker's writes the slots; a raw region is given
        back then."""
        if self._core.num_reading_pool or not self._has_safe_slots() or not self._has_proven_reads():
            return False
        self._raw_pool.release()
        return True

    def _has_safe_slots(self) -> bool:
        """Whether no stream of a lost worker can still write the slots: one that was killed with orders under way may,
        for a while. They get other memory then, which only a new engine sends."""
        if not self._sidecar.rows.may_still_move or self._has_fresh_slots:
            return True
        now = time.monotonic()
        if now < self._rotate_at:
            return False
        if not self._renew_slots():
            self._rotate_at = now + _ROTATE_EVERY_S  # no worker is taken until then
            return False
        self._has_fresh_slots = True
        return True

    def share_slots_by_fd(self, now: float) -> None:
        """`WorkerAgent.share_slots_by_fd`."""
        if self._renew_slots(has_fd=True):
            self._rotate(now)

    def _renew_slots(self, *, has_fd: bool = False) -> bool:
        try:
            self._sidecar.renew_slots(has_fd=has_fd)
        except (TransportError, OSError):
            self._sidecar.log.exception("cannot give the slots other memory")
            return False
        self._must_rotate = True
        return True

    def _has_proven_reads(self) -> bool:
        """Whether the engine reads nothing any more that it must not: the pool, by a raw write with an unknown end, or
        memory that the slots have left. Only a new engine proves that."""
        now = time.monotonic()
        if (self._must_rotate or self._writes.may_still_read) and now >= self._rotate_at:
            self._rotate(now)
        return not (self._must_rotate or self._writes.may_still_read)

    def _source(self) -> Source:
        return Source(endpoint=self.endpoint, incarnation=self.incarnation, key=self.public_key)

    # ---- actions and their ends ----

    def tick(self, now: float) -> None:
        """Deadlines, peers that were silent for too long, and slots that only a new engine can free."""
        self._links.tick(now)
        paths = [peer.info.figures.bytes_per_s for peer in self._core.peers.values()]
        self._turns.look(self._sidecar.desk.seat.gpu_turn_s, max(paths, default=0.0))
        if self._pulls is not None:
            self._pulls.poll(now)
        self._core.tick(now)
        if self._core.needs_rotation and now >= self._rotate_at:
            self._rotate(now)

    def _rotate(self, now: float) -> None:
        """Replace the engine: writes with an unknown end can read no slot and no pool any more."""
        self._rotate_at = now + _ROTATE_EVERY_S
        try:
            self._sidecar.rotate()
        except TransportError:
            self._sidecar.log.exception("cannot replace the engine")
            return
        self._writes.poll(now)  # those that the old engine took with it are reported by now
        self._must_rotate = self._writes.may_still_read = False
        self._core.rotated(now)

    def perform(self, now: float) -> None:
        """Do what the core asks for, and what follows from it; a gather is under way before the next is prepared."""
        actions = self._core.take_actions()
        while True:
            for action in actions:
                match action:
                    case SendToPeer():
                        self._links.send(action.peer, action.message)
                    case Notify():
                        self._links.flush()  # peers first: nobody tells them if this agent dies now
                        self._sidecar.notify(action.event)
                    case Gather():
                        self._gather(action)
                    case Write():
                        self._writes.post(action, now)
            self._tell_outlook()  # by that a stream of the worker begins with a gather
            if not actions or not (actions := self._core.take_actions()):
                break
        self._links.flush()

    def _tell_outlook(self) -> None:
        """Let a stream of the worker prepare for what is planned, and drop what it has prepared for in vain."""
        seat = self._sidecar.desk.seat
        if seat.pool is not None and (rows := seat.rows).has_timeline:
            rows.expect(*self._core.outlook)

    def _look_at_timeline(self, now: float) -> None:
        seat = self._sidecar.desk.seat
        if seat.pool is not None:
            self._core.timeline_reached(seat.rows.timeline, now)

    def _gather(self, gather: Gather) -> None:
        rows, look, row_sum = self._sidecar.rows, None, None
        if gather.wants_digest:
            first_byte, end_byte = gather.source.plan.segment_range(gather.segment)
            num_bytes = end_byte - first_byte
            if rows.sums_gathers:
                row_sum = RowSum(sum_digest, num_bytes)
            else:
                look = partial(digest, self._sidecar.slots.view(gather.slot)[:num_bytes])
        move = Move(gather.operation, gather.source, gather.segment, gather.cancel, row_sum)
        self._sidecar.trace.begin("gather", gather.operation, gather.slot, gather.segment)
        rows.gather(move, gather.slot, look)

    def poll(self, now: float) -> None:
        """See which writes and moves have ended."""
        self._writes.poll(now)
        self._look_at_timeline(now)
        for moved in self._sidecar.poll_moves():
            self._sidecar.trace.end("gather", moved.operation, moved.busy_s)
            found = moved.result if isinstance(moved.result, bytes) else b""
            self._core.gather_ended(
                moved.operation, now, moved.busy_s, moved.error, was_begun=moved.was_begun, digest=found
            )
