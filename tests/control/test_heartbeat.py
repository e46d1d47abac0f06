"""Heartbeats beside the connection that carries the messages, and what is made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer.control.auth import AllowList
from kvxfer.control.channel import REMOTE
from kvxfer.control.heartbeat import LOOK_EVERY_S, Absence, Heartbeat, PeerLife
from kvxfer.control.peer_channel import Credentials, PeerListener
from tests.control.waiting import CONNECTOR, INCARNATION, LISTENER, connect, next_frame

TIMEOUT_S = 0.4
SENDER = INCARNATION.encode()


@pytest.fixture
def peers() -> Iterator[PeerListener]:
    with PeerListener("127.0.0.1", 0, LISTENER) as listener:
        yield listener


def _heartbeat(peers: PeerListener) -> Heartbeat:
    return Heartbeat(peers.endpoint, INCARNATION, CONNECTOR, LISTENER.keys.public, TIMEOUT_S)


def _until(peers: PeerListener, condition: Callable[[], bool]) -> None:
    """Wait, while the listener lets in who comes."""
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        assert peers.receive() is None
        time.sleep(0.01)


def test_both_sides_know_that_heartbeats_come_and_that_they_have_ended(peers: PeerListener) -> None:
    assert not peers.is_alive(SENDER)
    with _heartbeat(peers) as heartbeat:
        _until(peers, heartbeat.is_up)
        _until(peers, lambda: peers.is_alive(SENDER))
        time.sleep(2 * TIMEOUT_S)
        assert heartbeat.is_up()
        assert peers.is_alive(SENDER)
        peers.close()
        _until(peers, lambda: not heartbeat.is_up())


def test_the_listener_knows_that_one_has_gone(peers: PeerListener) -> None:
    with _heartbeat(peers) as heartbeat:
        _until(peers, heartbeat.is_up)
        _until(peers, lambda: peers.is_alive(SENDER))
    _until(peers, lambda: not peers.is_alive(SENDER))


def test_more_messages_than_the_listener_takes_unread_do_not_stop_heartbeats(peers: PeerListener) -> None:
    with connect(peers.endpoint) as connection, _heartbeat(peers) as heartbeat:
        _until(peers, heartbeat.is_up)
        for _ in range(200):
            assert connection.send(REMOTE, b"x" * 1000)
        for _ in range(8):
            time.sleep(TIMEOUT_S / 2)
            assert heartbeat.is_up()
            assert peers.is_alive(SENDER)
        for _ in range(200):
            assert next_frame(peers) == (SENDER, b"x" * 1000)


def test_what_a_stranger_says_under_the_name_of_a_heartbeat_is_dropped(peers: PeerListener) -> None:
    with _heartbeat(peers) as heartbeat:
        heartbeat.send(REMOTE, b"I am a message")
        _until(peers, lambda: peers.dropped == 1)


def test_one_that_is_struck_off_the_allow_list_counts_as_gone(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text(CONNECTOR.keys.public + "\n")
    credentials = Credentials(LISTENER.keys, AllowList(path))
    with PeerListener("127.0.0.1", 0, credentials) as peers, connect(peers.endpoint) as connection:
        connection.send(REMOTE, b"hello")
        assert next_frame(peers, connection)[0] == SENDER
        with _heartbeat(peers) as heartbeat:
            _until(peers, heartbeat.is_up)
            _until(peers, lambda: peers.is_alive(SENDER))
            path.write_text("# nobody\n")
            _until(peers, lambda: bool(peers.news()))
            assert not peers.is_alive(SENDER)


def test_an_absence_begins_where_it_was_first_seen() -> None:
    absence = Absence()
    assert absence.look(1.0, is_there=True) == 0.0
    assert absence.look(9.0, is_there=False) == 0.0
    assert absence.look(9.5, is_there=False) == 0.5
    assert absence.look(9.6, is_there=True) == 0.0
    assert absence.look(9.7, is_there=False) == 0.0


@pytest.mark.parametrize("timeout_s", [0.1, 0.5, 5.0, 600.0])
def test_a_stopped_peer_is_lost_in_time(timeout_s: float) -> None:
    """Heartbeats end after half of the time, or 0.1 s."""
    ended_at = max(0.1, timeout_s / 2)
    life = PeerLife(-timeout_s)
    now = 0.0
    while life.look(now, timeout_s, is_there=now < ended_at):
        if now > 0.2:
            life.heard(now)
        now += LOOK_EVERY_S
    assert timeout_s - LOOK_EVERY_S <= now <= timeout_s + 1


def test_a_peer_may_take_a_while_to_begin_and_to_come_back() -> None:
    life = PeerLife(0.0)
    assert life.look(0.1, 5.0, is_there=False)
    assert life.look(5.0, 5.0, is_there=False)
    assert not life.look(5.1, 5.0, is_there=False)
    life = PeerLife(0.0)
    assert life.look(0.1, 5.0, is_there=True)
    life.heard(1.0)
    assert life.look(100.0, 5.0, is_there=True)
    assert life.look(101.0, 5.0, is_there=False)
    assert life.look(103.5, 5.0, is_there=False)
    assert life.look(103.6, 5.0, is_there=True)
    assert life.look(108.0, 5.0, is_there=True)  # and now a message has to come
    assert not life.look(109.0, 5.0, is_there=True)


@pytest.mark.parametrize("heard_at", [None, 0.15])
def test_a_connection_on_which_no_heartbeat_can_have_come_proves_nothing_for_long(heard_at: float | None) -> None:
    life = PeerLife(0.0)
    assert life.look(0.1, 5.0, is_there=True)
    if heard_at is not None:
        life.heard(heard_at)
    assert life.look(5.0, 5.0, is_there=True)
    assert not life.look(5.2, 5.0, is_there=True)
