"""Whether a peer lives: a connection of its own, on which nothing but ZMTP heartbeats go to and fro.

ZMQ's own thread sends and answers them. No loop takes part, so an agent whose loop is held for a while, by a long plan
or by an engine that keeps the interpreter lock, does not look dead; one that was stopped, has died or cannot be
reached does. It is apart from the connection that carries the messages, because ZMQ stops reading where unread messages
have filled a queue, and then reads no heartbeats either.

The decode agent connects, and its monitor tells when the connection ends. The prefill agent's socket has many peers,
and its monitor names descriptors, not peers: it asks the socket whether the peer can be reached
(`PeerListener.is_alive`), which it cannot once ZMQ has ended its connection. ZMQ ends it when the time has passed that
the last heartbeat allowed, so on this side a connection proves something only after its first heartbeat. A message of
the peer's that comes a moment later than the connection proves that one: the same thread sends both.

Of the time `timeout_s` after which a peer counts as lost, heartbeats take the first half, then it has the other to come
back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.control.peer_channel import HEARTBEAT_SUFFIX, Connection, Credentials

LOOK_EVERY_S = 0.25
"""How often the listening side has to look."""
_INTERVAL_S = 0.05
_MIN_RETURN_S = 0.5
_MAX_FRAMES_PER_LOOK = 64


class Heartbeat(Connection):
    """Decode agent's side. Both ends close it half of `timeout_s` after the last heartbeat; this one then tries to
    reconnect."""

    def __init__(self, endpoint: str, name: str, credentials: Credentials, remote_key: str, timeout_s: float) -> None:
        """Connect in the background; `name` is that of the connection which carries the messages. Raises
        `ProtocolError` as `Connection`."""
        self._timeout_s = timeout_s
        super().__init__(endpoint, name + HEARTBEAT_SUFFIX, credentials, remote_key)

    def _set_options(self) -> None:
        super()._set_options()
        half_ms = max(100, round(self._timeout_s * 500))
        self._socket.heartbeat_ivl = round(_INTERVAL_S * 1000)
        self._socket.heartbeat_timeout = half_ms
        # The other end sends none of its own: it hears here how long it may wait for ours.
        self._socket.heartbeat_ttl = half_ms

    def is_up(self) -> bool:
        """Whether the peer's heartbeats come. Never blocks."""
        for _ in range(_MAX_FRAMES_PER_LOOK):
            if self.receive() is None:
                break  # what came were empty frames: the other end looks by sending one
        return self._is_up


def return_s(timeout_s: float) -> float:
    """How long a peer whose heartbeats have ended may take to come back, in seconds."""
    return max(_MIN_RETURN_S, timeout_s / 2)


@dataclass(slots=True)
class Absence:
    """How long a peer's heartbeats have been away, as far as its agent's loop has looked."""

    since: float | None = None

    def look(self, now: float, *, is_there: bool) -> float:
        """Look once more. Seconds since they were first found away, 0 while they come."""
        if is_there:
            self.since = None
        elif self.since is None:
            self.since = now
        return 0.0 if self.since is None else now - self.since


@dataclass(slots=True)
class PeerLife:
    """Listening side: whether a peer still counts as alive. `met_at` is when it said hello."""

    met_at: float
    _absence: Absence = field(default_factory=Absence)
    _back_at: float | None = None  # since when its heartbeats' connection stands
    _is_proven: bool = False  # a heartbeat has come on that

    def look(self, now: float, timeout_s: float, *, is_there: bool) -> bool:
        """Look once more. False where the peer is lost."""
        away_s = self._absence.look(now, is_there=is_there)
        if not is_there:
            self._back_at, self._is_proven = None, False
            # Its heartbeats may begin a little later than its messages.
            return away_s <= return_s(timeout_s) or now - self.met_at <= timeout_s
        self._back_at = now if self._back_at is None else self._back_at
        return self._is_proven or now - self._back_at <= timeout_s

    def heard(self, now: float) -> None:
        """A message of the peer has come."""
        self._is_proven |= self._back_at is not None and now - self._back_at > 2 * _INTERVAL_S
