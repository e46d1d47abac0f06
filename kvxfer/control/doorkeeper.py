"""Who is let in at a TCP port: answers ZMQ's authentication requests and counts what becomes of connections.

ZMQ asks for each connection, after the CURVE handshake has proven that the other end has the secret key of the public
key it shows, and before a single message of it is read.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from dataclasses import dataclass, field

import zmq
from zmq.backend import zmq_poll

from kvxfer.control.auth import AllowList, encode_key

ZAP_DOMAIN = b"kvxfer"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_MAX_REQUESTS_PER_CALL = 64
_MAX_EVENTS_PER_CALL = 1024
_MAX_NOTES = 16
_EVENT = struct.Struct("=Hi")
# Not all: where the process has no descriptor left, ZMQ tells of connections that it cannot accept without end.
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_monitor_numbers = itertools.count()
_READABLE = int(zmq.POLLIN)  # a plain number: operations on the library's enumerations take longer than the call


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asked before `recv`: the exception for one that is not there costs four times more, and
    the option that tells it nearly twice."""
    return bool(zmq_poll([(socket, _READABLE)], 0))


class Doorkeeper:
    """Admits the keys of an allow-list, or every key without one. `refused` are the latest it sent away, for the log.

    It answers for its whole ZMQ context, so a context has one listener.
    """

    def __init__(self, replies: zmq.Socket[bytes], allowed: AllowList | None) -> None:
        """Take over `replies`, a new REP socket."""
        self.allowed = allowed
        self.refused: deque[tuple[str, str]] = deque(maxlen=_MAX_NOTES)  # key, address
        self.num_refused = 0
        self.socket = replies
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def admits(self, key: str) -> bool:
        """Whether `key` may talk to us."""
        return self.allowed is None or key in self.allowed

    def answer(self) -> None:
        """Answer the requests that are there, up to a bound. Never blocks."""
        for _ in range(_MAX_REQUESTS_PER_CALL):
            if not is_readable(self.socket):
                return
            request = self.socket.recv_multipart(zmq.DONTWAIT)
            _, request_id, domain, address, _, mechanism, *credentials = request
            assert domain == ZAP_DOMAIN
            assert mechanism == b"CURVE"
            key = encode_key(credentials[0])
            if self.admits(key):
                answer = [b"200", b"OK", key.encode()]
            else:
                self.refused.append((key, address.decode("ascii", "replace")))
                answer = [b"400", b"this key is not in the allow-list", b""]
            self.socket.send_multipart([_ZAP_VERSION, request_id, *answer, b""], zmq.DONTWAIT)


class ConnectionWatch:
    """Tells what becomes of the connections of one socket, handshakes above all."""

    def __init__(self, watched: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
        """Watch `watched`; take over `events`, a new PAIR socket of the same context."""
        self.socket = events
        self._watched = watched
        # ZMQ's own thread waits where a queue of events is full, so this one has no bound; the loop empties it.
        self.socket.rcvhwm = 0
        self.socket.linger = 0
        endpoint = f"inproc://kvxfer-watch-{next(_monitor_numbers)}"
        watched.monitor(endpoint, _EVENTS)
        self.socket.connect(endpoint)

    def events(self) -> list[tuple[int, int]]:
        """Events and their values, oldest first, up to a bound. Never blocks."""
        found: list[tuple[int, int]] = []
        while len(found) < _MAX_EVENTS_PER_CALL and is_readable(self.socket):
            frame, _ = self.socket.recv_multipart(zmq.DONTWAIT)
            found.append(_EVENT.unpack(frame))
        return found

    def stop(self) -> None:
        """Watch no longer; call it before either socket is closed."""
        # pyzmq's `disable_monitor()` would leave a socket of its own open.
        self._watched.monitor(None, 0)


@dataclass(slots=True)
class DoorCounts:
    """What became of the connections that a listener accepted.

    `num_admitted` completed the handshake. `num_refused` showed a key that is not allowed, `num_failed` broke the
    handshake off or spoke ZMQ without CURVE, `num_strangers` left without one: what speaks HTTP or nothing at all.
    """

    num_accepted: int = 0
    num_admitted: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_strangers: int = 0
    _undecided: dict[int, float] = field(default_factory=dict)  # descriptor: when it was accepted

    @property
    def num_undecided(self) -> int:
        """Connections of which it is not known yet what becomes of them."""
        return len(self._undecided)

    def note(self, event: int, value: int, now_s: float) -> None:
        """Count one event of the listener's socket."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self.num_accepted += 1
                self._undecided[value] = now_s
            case zmq.EVENT_DISCONNECTED:
                self._undecided.pop(value, None)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_admitted += 1
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.num_refused += 1
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.num_failed += 1

    def settle(self, now_s: float, handshake_s: float) -> None:
        """Count the strangers: they are what is left.

        Handshakes do not say which connection they belong to. So a connection that is still open counts as undecided
        until `handshake_s` after it was accepted, when ZMQ has ended it or it is admitted.
        """
        for descriptor, accepted_s in list(self._undecided.items()):
            if now_s - accepted_s <= handshake_s:
                break  # those behind it are younger
            del self._undecided[descriptor]
        num_known = self.num_admitted + self.num_refused + self.num_failed + len(self._undecided)
        self.num_strangers = max(self.num_strangers, self.num_accepted - num_known)
