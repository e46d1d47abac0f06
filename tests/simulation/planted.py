"""Faults planted into one core, to see that the invariants find them. The product has no flags for them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.control.messages import AbortLeg, Credits, DecodeToPrefill
from kvxfer.decode.receive import Receive, ReceivedChunk, ReceiveLeg, RowsToPull
from kvxfer.prefill.leg import Leg, PeerInfo
from kvxfer.prefill.peers import LegKey, Peer
from kvxfer.prefill.transfer import Transfer
from kvxfer.transfer import LegState
from kvxfer.transports.base import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.decode_agent import SimDecode
    from tests.simulation.prefill_agent import SimPrefill


class Bug(enum.Enum):
    """What can be planted."""

    GENERATION_NOT_CHECKED = "generation-not-checked"
    FINISHED_TOO_EARLY = "finished-too-early"
    REPACKED_ON_UNKNOWN = "repacked-on-unknown"
    NO_TOMBSTONE = "no-tombstone"  # an abort that finds no leg leaves nothing behind
    QUIESCED_COUNTS_POSTED = "quiesced-counts-posted"
    TERMINAL_BEFORE_DRAINED = "terminal-before-drained"
    LOST_CREDITS_FORGOTTEN = "lost-credits-forgotten"
    REGION_NOT_CHECKED = "region-not-checked"  # credits are used whatever region they mean
    CORRUPTION_IGNORED = "corruption-ignored"
    TIMELINE_IGNORED = "timeline-ignored"
    PULLED_UNREADY = "pulled-unready"  # what is announced to be pulled is pulled at once


def plant_in_prefill(bug: Bug | None, agent: SimPrefill) -> None:
    """Plant `bug` in the core of a prefill agent, if it belongs there."""
    life = agent.core._life
    match bug:
        case Bug.FINISHED_TOO_EARLY:
            _replace(life, "_finish", _finish_early(agent, life._finish))
        case Bug.REPACKED_ON_UNKNOWN:
            original = life.sender.write_ended

            def write_ended(operation: int, outcome: Outcome, now: float) -> Leg:
                return original(operation, Outcome.FAILED if outcome is Outcome.UNKNOWN else outcome, now)

            _replace(life.sender, "write_ended", write_ended)
        case Bug.NO_TOMBSTONE:

            def peer_paired(info: PeerInfo) -> None:
                agent.core.peers[info.incarnation] = _ForgetfulPeer(info, info.region_id)
                life.sender.num_peers = len(agent.core.peers)

            def give_up(_peer: str, _name: str, _abort: AbortLeg, _now: float) -> None:
                pass

            _replace(agent.core, "peer_paired", peer_paired)
            _replace(life, "give_up", give_up)
        case Bug.QUIESCED_COUNTS_POSTED:

            def quiesce(leg: Leg, now: float) -> None:
                book = agent.world.judge.book(agent, leg)
                if leg.state is LegState.STOPPING and book.num_posted == leg.num_ended:
                    leg.move(LegState.QUIET)
                    life.send_quiesced(leg, now)

            _replace(life, "quiesce", quiesce)
        case Bug.TIMELINE_IGNORED:
            submit = agent.core.submit
            _replace(agent.core, "submit", lambda chunk, now: submit(msgspec.structs.replace(chunk, ready=0), now))
        case Bug.REGION_NOT_CHECKED:
            receive = agent.core.receive

            def receive_any(peer: str, message: DecodeToPrefill, now: float) -> None:
                known = agent.core.peers.get(peer)
                if isinstance(message, Credits) and known is not None:
                    message = msgspec.structs.replace(message, region_id=known.region_id)
                receive(peer, message, now)

            _replace(agent.core, "receive", receive_any)


def plant_in_decode(bug: Bug | None, agent: SimDecode) -> None:
    """Plant `bug` in the core of a decode agent, if it belongs there."""
    core = agent.core
    match bug:
        case Bug.GENERATION_NOT_CHECKED:

            def find_leg(incarnation: str, transfer: str, _generation: int) -> ReceiveLeg | None:
                receive = core.receives.get(transfer)
                legs = [] if receive is None else receive.legs
                return next((leg for leg in legs if leg.source.incarnation == incarnation and not leg.is_closed), None)

            _replace(core, "_leg", find_leg)
        case Bug.TERMINAL_BEFORE_DRAINED:
            settle = core._life.settle

            def settle_at_once(receive: Receive, now: float) -> None:
                num_scattering, receive.num_scattering = receive.num_scattering, 0
                settle(receive, now)
                receive.num_scattering = num_scattering

            _replace(core._life, "settle", settle_at_once)
        case Bug.LOST_CREDITS_FORGOTTEN:
            _replace(core._life.lender, "repeat", lambda _leg, _num_known: None)
        case Bug.CORRUPTION_IGNORED:
            ended = core._moves.ended

            def ended_well(operation: int, now: float, busy_s: float, error: str | None, *, is_corrupt: bool) -> None:
                ended(operation, now, busy_s, None if is_corrupt else error, is_corrupt=False)

            _replace(core._moves, "ended", ended_well)
        case Bug.PULLED_UNREADY:
            announce = core._moves.announce_pull

            def announce_and_pull(leg: ReceiveLeg, chunk: ReceivedChunk, rows: RowsToPull) -> None:
                announce(leg, chunk, rows)
                chunk_idx = next(idx for idx, known in leg.chunks.items() if known is chunk)
                core._moves.pull(core.receives[leg.transfer], leg, chunk_idx)

            _replace(core._moves, "announce_pull", announce_and_pull)


class _ForgetfulPeer(Peer):
    """Keeps no tombstones."""

    def bury(self, key: LegKey) -> None:
        pass


def _finish_early(
    agent: SimPrefill, finish: Callable[[Transfer, Leg, float], None]
) -> Callable[[Transfer, Leg, float], None]:
    """Count a write as done once it was emitted."""

    def finish_early(transfer: Transfer, leg: Leg, now: float) -> None:
        ended = leg.written
        under_way: list[Any] = [op for op in agent.core._life.sender._writes.values() if op.leg is leg]
        leg.written = [*ended, *under_way]  # only their number plays a part
        finish(transfer, leg, now)
        leg.written = ended

    return finish_early


def _replace(owner: object, name: str, method: object) -> None:
    setattr(owner, name, method)
