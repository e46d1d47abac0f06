"""Whether a grant can be served."""

from __future__ import annotations

from kvxfer.control.messages import Grant
from kvxfer.prefill.leg import Mode
from kvxfer.prefill.lifecycle import Lifecycle
from kvxfer.prefill.peers import MAX_LEGS_PER_PEER, Peer
from kvxfer.transfer import Reason

SHUTDOWN_DETAIL = "the prefill agent is shutting down"


def find_refusal(life: Lifecycle, peer: Peer, grant: Grant) -> tuple[Reason, str] | None:
    """Why a new grant cannot be served, or None."""
    if life.layout is None:
        return Reason.WORKER_LOST, "the prefill worker is gone"
    if life.mode is Mode.RAW and peer.info.verify:
        return Reason.PEER_REFUSED, "mode raw: it has no checksums, but the decode agent is set to verify"
    if life.mode is Mode.P2P and not grant.can_pull:
        return Reason.PEER_REFUSED, f"mode p2p: the decode agent cannot map this pool: {grant.pull_trouble}"
    num_groups = len(peer.info.route.groups)
    if len(grant.wanted) != num_groups or len(grant.have) != num_groups:
        return Reason.MISMATCH, f"grant: got ranges of {len(grant.wanted)} groups, expected {num_groups}"
    if not peer.has_room():
        return Reason.PEER_REFUSED, f"grant: got more than {MAX_LEGS_PER_PEER} live transfers of one decode agent"
    transfer = life.transfers.get(grant.transfer)
    if life.is_draining and (transfer is None or not transfer.legs):
        return Reason.SHUTDOWN, SHUTDOWN_DETAIL
    if transfer is None and grant.transfer in life.ended:
        return Reason.STALE, f"the transfer has ended ({life.why_ended(grant.transfer)}); ask for a new ticket"
    if transfer is None:
        if grant.home:
            return Reason.UNKNOWN_TRANSFER, f"no ticket {grant.transfer} was made by this run of the agent"
        return None
    if transfer.reason is not None:
        return transfer.reason, transfer.detail
    if peer.info.incarnation in transfer.legs:
        return Reason.STALE, "the decode agent has another generation of this transfer open"
    if transfer.legs and grant.num_decode_groups != transfer.num_decode_groups:
        return Reason.MISMATCH, f"got {grant.num_decode_groups} decode groups, expected {transfer.num_decode_groups}"
    world = {leg.peer.dst_world for leg in transfer.legs.values()} | {peer.info.dst_world}
    if len(world) > transfer.num_decode_groups:
        return Reason.MISMATCH, f"dst_world: got {sorted(world)} from decode agents of one transfer, expected one"
    return None
