"""Channels between agents: TCP with CURVE, always.

Both ends prove that they have the secret key of the public key they show, and everything between them is encrypted. A
decode agent learns the prefill agent's key from the ticket, so nobody else can answer at its address. A prefill agent
admits the keys of its allow-list.
"""

from __future__ import annotations

import errno
import re
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvxfer.control.address import bind_error, check_endpoint, format_endpoint, is_loopback, is_wildcard, resolve
from kvxfer.control.auth import AllowList, KeyPair, is_key, read_secret_key
from kvxfer.control.channel import HANDSHAKE_MS, Channel, Context
from kvxfer.control.doorkeeper import ZAP_DOMAIN, DoorCounts, Doorkeeper
from kvxfer.errors import ConfigError, ControlError, ProtocolError

MAX_PEER_FRAME_BYTES = 8 << 20
"""Frames between agents are smaller than a worker's; only a pull names pages across sides."""
HEARTBEAT_SUFFIX = ".alive"
"""Ends the name of a connection that carries heartbeats alone (`kvxfer.control.heartbeat`)."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000
_MAX_NAMES = 4096
_MAX_UNREAD_MESSAGES = 64
_MAX_FAILED_HANDSHAKES = 3


@dataclass(frozen=True, slots=True)
class Credentials:
    """An agent's own keys, and whom it talks to: everybody without `allowed`."""

    keys: KeyPair
    allowed: AllowList | None = None

    def reload(self) -> str | None:
        """Read the allow-list again if its file has changed; what became of it, for the log, or None."""
        return None if self.allowed is None else self.allowed.reload()


def new_keys() -> KeyPair:
    """A fresh pair from the system's random numbers."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def load_credentials(key_file: str, allowed_keys_file: str) -> Credentials:
    """The pair whose secret half lies in `key_file`, or a fresh one for this run where that is empty; and the
    allow-list, where `allowed_keys_file` is not empty.

    Raises `ConfigError` for files that are missing, wrong, or open to others.
    """
    keys = new_keys()
    if key_file:
        secret = read_secret_key(Path(key_file))
        keys = KeyPair(zmq.curve_public(secret.encode("ascii")).decode("ascii"), secret)
    return Credentials(keys, AllowList(Path(allowed_keys_file)) if allowed_keys_file else None)


def incarnation_of(sender: bytes) -> bytes:
    """The incarnation of a sender that `PeerListener.receive` named."""
    return sender.partition(b"-")[0]


class PeerListener(Channel):
    """Prefill agent's side of the channel between agents. `endpoint` is what peers are told to connect to,
    `address` the numeric one at which this host is reached.

    Senders are named by their incarnations, and a number where one has several connections (`incarnation_of`); what
    calls itself otherwise is dropped and counted. An incarnation belongs to the key that used it first: a message
    under it from another key is dropped, and so is one whose key was struck off the allow-list. `counts` and `news()`
    say who did not get in.
    """

    _sender_name = re.compile(rb"[0-9a-f]{32}(-[0-9a-f]{1,16})?")

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        *,
        allow_wildcard: bool = False,
        advertise_host: str | None = None,
    ) -> None:
        """Listen on one named address. Port 0 takes a free one. Without an allow-list every key is admitted, on
        loopback addresses only.

        A wildcard address needs `allow_wildcard` and an `advertise_host` that peers can reach. Raises `ConfigError`.
        """
        address, advertised = _check_addresses(host, port, credentials.allowed, allow_wildcard, advertise_host)
        self._credentials = credentials
        self._counts = DoorCounts()
        self._senders: dict[bytes, str] = {}  # those that were found to be in order, and their keys
        self._owners: dict[bytes, str] = {}  # incarnations and the keys they belong to, oldest first
        # ZMQ has one authenticator a context: the listener's own context keeps it from any other's connections.
        super().__init__(zmq.ROUTER, MAX_PEER_FRAME_BYTES, Context())
        try:
            self._doorkeeper = Doorkeeper(self._open_helper(zmq.REP), credentials.allowed)
            self._events = self._watch_connections()
            self._socket.ipv6 = ":" in address
            self._socket.bind(format_endpoint(address, port))
        except zmq.ZMQError as error:
            self.close()
            raise bind_error(host, port, error.errno, error.strerror) from error
        except ControlError:
            self.close()
            raise
        bound_port = int(str(self._socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0").rpartition(":")[2])
        self.endpoint = format_endpoint(advertised, bound_port)
        self.address = advertised if is_wildcard(address) else address

    def _set_options(self) -> None:
        super()._set_options()
        # Of each peer; more wait on its side. ZMQ counts messages, whatever their length.
        self._socket.rcvhwm = _MAX_UNREAD_MESSAGES
        # A peer that lost its connection comes back under the same name; the old one may not have ended yet.
        self._socket.router_handover = 1
        self._socket.curve_server = 1
        self._socket.curve_secretkey = self._credentials.keys.secret.encode("ascii")
        self._socket.zap_domain = ZAP_DOMAIN
        # Without it, connections would be admitted where the authenticator cannot be asked.
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    @property
    def counts(self) -> DoorCounts:
        """What became of all connections so far, as far as `receive()` has looked."""
        return self._counts

    @property
    def last_host(self) -> str:
        """The numeric address from which the message came that `receive()` returned last."""
        return "" if self._part is None else str(self._part.get("Peer-Address"))

    def key_of(self, sender: bytes) -> str:
        """The public key that a sender has proven to have; empty for one that was not heard for long."""
        return self._owners.get(incarnation_of(sender), "")

    def news(self) -> list[str]:
        """Look whether the allow-list has changed; what the log should say of the door since the last call."""
        found = [
            f"refused a decode agent at {address}: its key {key} is not in security.allowed_keys_file"
            for key, address in self._doorkeeper.refused  # under a flood, the latest
        ]
        self._doorkeeper.refused.clear()
        changed = self._credentials.reload()
        return found if changed is None else [*found, changed]

    def look(self) -> None:
        super().look()
        if self._counts.num_undecided:  # time alone decides on some
            self._counts.settle(time.monotonic(), HANDSHAKE_MS / 1000 + 1)

    def _look_at_helpers(self) -> None:
        """Look after those at the door."""
        self._doorkeeper.answer()
        now_s = time.monotonic()
        for event, value in self._events.events():
            self._counts.note(event, value, now_s)
        self._counts.settle(now_s, HANDSHAKE_MS / 1000 + 1)

    def is_alive(self, sender: bytes) -> bool:
        """Whether the connection that carries the heartbeats of a sender stands. One whose key is not allowed any more
        counts as gone."""
        if not self._doorkeeper.admits(self.key_of(sender)):
            return False
        try:
            self._socket.send_multipart([sender + HEARTBEAT_SUFFIX.encode(), b""], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return error.errno == errno.EAGAIN  # it is there, but its loop has read none of these for very long
        return True

    def _is_sender(self, name: bytes) -> bool:
        assert self._part is not None
        key = str(self._part.get("User-Id"))
        if self._senders.get(name) == key and self._doorkeeper.admits(key):
            return True
        if self._sender_name.fullmatch(name) is None or not self._doorkeeper.admits(key):
            return False
        if self._owners.setdefault(incarnation_of(name), key) != key:
            return False
        if len(self._owners) > _MAX_NAMES:
            del self._owners[next(iter(self._owners))]
            self._senders.clear()
        if len(self._senders) >= _MAX_NAMES:
            self._senders.clear()
        self._senders[name] = key
        return True


def _check_addresses(
    host: str, port: int, allowed: AllowList | None, allow_wildcard: bool, advertise_host: str | None
) -> tuple[str, str]:
    """The numeric addresses to bind and to advertise. Raises `ConfigError`."""
    address = resolve(host, "host")
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: got {port}, expected 0 to 65535")
    if is_wildcard(address) and not (allow_wildcard and advertise_host):
        raise ConfigError(
            f"host: got {host!r}, expected one named address: a wildcard listens on every network; "
            "where that is meant, set allow_wildcard and advertise_host"
        )
    advertised = resolve(advertise_host, "advertise_host") if advertise_host else address
    if is_wildcard(advertised):
        raise ConfigError(f"advertise_host: got {advertise_host!r}, expected an address that peers can reach")
    if allowed is None and not is_loopback(address):
        raise ConfigError(
            f"security.allowed_keys_file: got nothing, expected a file, because {host!r} can be reached from other "
            "hosts: list the public keys of the decode agents in it, one a line; kvxfer keygen makes them"
        )
    return address, advertised


class Connection(Channel):
    """Decode agent's side of the channel between agents.

    The listener knows it by `name.encode()`: the incarnation, and a number where it has several connections to one
    address. It reconnects by itself, maybe to a later run of the peer at the
    same address, which then gets what was queued if it has the same key: the first message of a run is `Hello`, and a
    listener refuses everything else from a sender that has not said it.

    `refusal` says why the other end will never talk to us, once `receive()` has found out; empty until then.
    """

    def __init__(self, endpoint: str, name: str, credentials: Credentials, remote_key: str) -> None:
        """Connect in the background, to who has `remote_key` and nobody else. Raises `ProtocolError` for an endpoint
        or a key that cannot be one, or that is not allowed."""
        address, _ = check_endpoint(endpoint)
        if not is_key(remote_key):
            raise ProtocolError(f"key: got {remote_key[:60]!r}, expected the public key of the agent at {endpoint}")
        if credentials.allowed is not None and remote_key not in credentials.allowed:
            raise ProtocolError(
                f"key: got {remote_key}, which is not in this agent's security.allowed_keys_file: add it there if the "
                f"agent at {endpoint} may feed this one"
            )
        self.refusal = ""
        self._keys = credentials.keys
        self._remote_key = remote_key
        self._is_up = False
        self._num_failed = 0
        super().__init__(zmq.DEALER, MAX_PEER_FRAME_BYTES)
        self._socket.routing_id = name.encode("ascii")
        self._socket.ipv6 = ":" in address
        try:
            self._events = self._watch_connections()
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"endpoint: cannot connect to {endpoint!r}: {error.strerror}") from error
        except ControlError:
            self.close()
            raise

    def _set_options(self) -> None:
        super()._set_options()
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        self._socket.curve_publickey = self._keys.public.encode("ascii")
        self._socket.curve_secretkey = self._keys.secret.encode("ascii")
        self._socket.curve_serverkey = self._remote_key.encode("ascii")

    def _look_at_helpers(self) -> None:
        """See what the connection does."""
        for event, _ in self._events.events():
            self._note(event)

    def _note(self, event: int) -> None:
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
                self._num_failed = 0
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refusal = (
                    f"it does not admit this agent's key {self._keys.public}: "
                    "add the key to its security.allowed_keys_file"
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.refusal = "what listens there does not speak ZMQ with CURVE: is it another program?"
            case zmq.EVENT_DISCONNECTED if self._is_up:
                self._is_up = False
            case zmq.EVENT_DISCONNECTED:
                # Once may be a peer that was just ending; again and again is one that cannot read what we say.
                self._num_failed += 1
                if self._num_failed >= _MAX_FAILED_HANDSHAKES and not self.refusal:
                    self.refusal = (
                        f"what listens there ends every handshake: it is another program, or has not the key "
                        f"{self._remote_key} that the ticket names"
                    )
