"""States of a transfer and of its legs, the legal moves between them, and why a transfer ends.

A transfer is all KV of one request for one decode group; a leg is one (prefill agent, decode agent) pair of it.
"""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """Why a transfer ended other than well. Clients, logs and metrics use these same words."""

    ABORTED_BY_WORKER = "aborted_by_worker"
    REJECTED = "rejected"
    ABORTED_BY_PEER = "aborted_by_peer"
    DEADLINE = "deadline"
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_LOST = "peer_lost"
    PEER_REFUSED = "peer_refused"
    LAYOUT_MISMATCH = "layout_mismatch"
    UNKNOWN_TRANSFER = "unknown_transfer"
    STALE = "stale"
    WRITE_FAILED = "write_failed"
    WRITE_UNKNOWN = "write_unknown"
    GATHER_FAILED = "gather_failed"
    PULL_FAILED = "pull_failed"
    SCATTER_FAILED = "scatter_failed"
    CORRUPT = "corrupt"
    INCOMPLETE = "incomplete"
    MISMATCH = "mismatch"
    WORKER_LOST = "worker_lost"
    AGENT_LOST = "agent_lost"
    SHUTDOWN = "shutdown"


class EventKind(enum.Enum):
    """What happened to a transfer. All but `SOURCE_FREE` are terminal; each side gets exactly one terminal event."""

    SENT = "sent"
    SOURCE_FREE = "source_free"
    LANDED = "landed"
    FAILED = "failed"
    ABORTED = "aborted"


class LegState(enum.Enum):
    """A leg on the prefill side. It is born by its grant; what the worker submits before that waits in the transfer."""

    GRANTED = "granted"  # the decode side asked, the worker has submitted nothing yet
    ACTIVE = "active"  # both are there: segments move
    STOPPING = "stopping"  # ends without success; waits for what was emitted
    QUIET = "quiet"  # nothing of it runs, for ever
    FINISHED = "finished"  # every segment of every chunk was written


LEG_MOVES: dict[LegState, frozenset[LegState]] = {
    LegState.GRANTED: frozenset({LegState.ACTIVE, LegState.STOPPING}),
    LegState.ACTIVE: frozenset({LegState.FINISHED, LegState.STOPPING}),
    LegState.STOPPING: frozenset({LegState.QUIET}),
    LegState.QUIET: frozenset(),
    LegState.FINISHED: frozenset(),
}


class ReceiveState(enum.Enum):
    """A transfer on the decode side."""

    OPEN = "open"  # accepted; pairing with some source still runs
    WAITING = "waiting"  # every grant is out
    DRAINING = "draining"  # ends without success; own scatters still run
    LANDED = "landed"  # every owned row of every group and layer is in its pages
    ENDED = "ended"  # ended without success; its pages are quiet


RECEIVE_MOVES: dict[ReceiveState, frozenset[ReceiveState]] = {
    ReceiveState.OPEN: frozenset({ReceiveState.WAITING, ReceiveState.DRAINING}),
    ReceiveState.WAITING: frozenset({ReceiveState.LANDED, ReceiveState.DRAINING}),
    ReceiveState.DRAINING: frozenset({ReceiveState.ENDED}),
    ReceiveState.LANDED: frozenset(),
    ReceiveState.ENDED: frozenset(),
}
