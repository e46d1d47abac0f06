"""Keys and allow-lists: what is a key, which files are trusted, and that nobody is let in who should not be."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import app
from kvxfer.control.auth import AllowList, encode_key, is_key, read_secret_key, write_secret_key
from kvxfer.control.channel import REMOTE, Channel, Selector
from kvxfer.control.peer_channel import Connection, Credentials, PeerListener, load_credentials, new_keys
from kvxfer.errors import ConfigError, ProtocolError
from tests.control.waiting import CONNECTOR, INCARNATION, LISTENER, connect, next_frame, num_descriptors

KEYS = new_keys()
OTHER = new_keys().public


def _wait(done: Callable[[], bool], *channels: Channel) -> None:
    """Until `done`, which must come soon, look after channels that hear nothing."""
    deadline_s = time.monotonic() + 5
    while not done():
        assert time.monotonic() < deadline_s
        Selector(channels).wait(0.1)
        for channel in channels:
            assert channel.receive() is None


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = num_descriptors()
    yield
    assert num_descriptors() == before


# ---- keys ----


def test_what_is_a_key() -> None:
    assert is_key(KEYS.public)
    assert is_key(KEYS.secret)
    assert is_key(encode_key(bytes(32)))
    assert is_key(encode_key(b"\xff" * 32))
    for text in ("", "x", KEYS.public[:-1], KEYS.public + "0", KEYS.public[:-1] + '"', "#" * 40, "\u0661" * 40):
        assert not is_key(text)


def test_the_published_example_of_z85() -> None:
    """From its specification, ZeroMQ RFC 32."""
    assert encode_key(bytes.fromhex("864fd26fb559f75b") * 4) == "HelloWorld" * 4


def test_keys_are_fresh_and_secrets_are_not_shown() -> None:
    assert KEYS.public != new_keys().public
    assert KEYS.secret not in repr(Credentials(KEYS))


# ---- files ----


def _list(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "allowed"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    return path


def test_a_secret_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    umask = os.umask(0)
    try:
        write_secret_key(path, KEYS)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_credentials(str(path), "") == Credentials(KEYS)
    with pytest.raises(ConfigError, match="exists already"):
        write_secret_key(path, new_keys())
    assert read_secret_key(path) == KEYS.secret


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o666, 0o620])
def test_a_secret_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_secret_key(path, KEYS)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"key_file: .*got mode {mode:#o}.*chmod 600 {path}"):
        read_secret_key(path)


def test_a_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_secret_key(path, KEYS)
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="is owned by user"):
        read_secret_key(path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "short", KEYS.secret[:-1] + '"', f"{KEYS.secret}\n{KEYS.secret}"])
def test_a_key_file_without_a_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="make one with kvxfer keygen") as caught:
        read_secret_key(path)
    assert KEYS.secret[:10] not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key_file: .*No such file"):
        load_credentials(str(tmp_path / "none"), "")
    with pytest.raises(ConfigError, match=r"allowed_keys_file: .*No such file"):
        load_credentials("", str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="expected a file"):
        read_secret_key(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="expected a file"):
        AllowList(tmp_path)
    (tmp_path / "big").write_bytes(b"\n" * 5000)
    (tmp_path / "big").chmod(0o600)
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        read_secret_key(tmp_path / "big")


def test_an_allow_list_is_read_line_by_line(tmp_path: Path) -> None:
    last = encode_key(b"\xff" * 32)
    path = _list(tmp_path, f"\n# decode-0\n{KEYS.public}   decode-0 of rack 7\n#\n  {last}\n#{OTHER}")
    allowed = AllowList(path)
    assert KEYS.public in allowed
    assert last in allowed
    assert OTHER not in allowed
    assert len(allowed) == 2


@pytest.mark.parametrize("text", ["decode-0", f"{OTHER}x", f"# fine\n{OTHER[:-1]}"])
def test_a_wrong_line_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_keys_file: .* line \d: got .*, expected a public key"):
        AllowList(_list(tmp_path, text))


def test_an_allow_list_that_others_can_change_is_refused(tmp_path: Path) -> None:
    path = _list(tmp_path, OTHER)
    path.chmod(0o664)
    with pytest.raises(ConfigError, match="chmod go-w"):
        AllowList(path)


def test_an_allow_list_follows_its_file(tmp_path: Path) -> None:
    path = _list(tmp_path, OTHER)
    allowed = AllowList(path)
    assert allowed.reload() is None
    path.write_text(f"{OTHER}\n{KEYS.public}")
    assert allowed.reload() == f"allowed_keys_file: {path}: 2 keys"
    assert KEYS.public in allowed
    fresh = tmp_path / "fresh"  # as editors and mounted secrets do it: another file under the name
    fresh.write_text(KEYS.public)
    fresh.rename(path)
    assert "1 keys" in (allowed.reload() or "")
    assert OTHER not in allowed


@pytest.mark.parametrize("slip", ["missing", "wrong", "open"])
def test_a_slip_in_the_file_cuts_nobody_off(tmp_path: Path, slip: str) -> None:
    path = _list(tmp_path, OTHER)
    allowed = AllowList(path)
    if slip == "missing":
        path.unlink()
    elif slip == "wrong":
        path.write_text("oops")
    else:
        path.chmod(0o666)
    assert (allowed.reload() or "").endswith("the 1 keys of before stay allowed")
    assert OTHER in allowed
    assert allowed.reload() is None  # said once


def test_keygen(tmp_path: Path) -> None:
    path = tmp_path / "agent.key"
    done = CliRunner().invoke(app, ["keygen", "--out", str(path)])
    assert done.exit_code == 0
    public = done.stdout.strip()
    assert load_credentials(str(path), "").keys.public == public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().splitlines()[2] not in done.output
    assert isinstance(CliRunner().invoke(app, ["keygen", "--out", str(path)]).exception, ConfigError)
    as_json = CliRunner().invoke(app, ["keygen", "--json", "--out", str(tmp_path / "second")])
    facts = json.loads(as_json.stdout)
    assert facts.keys() == {"public_key", "key_file"}
    assert load_credentials(facts["key_file"], "").keys.public == facts["public_key"] != public


# ---- who is let in ----


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[PeerListener, Path]]:
    """A listener that admits `CONNECTOR`, and its allow-list."""
    path = _list(tmp_path, CONNECTOR.keys.public)
    with PeerListener("127.0.0.1", 0, Credentials(LISTENER.keys, AllowList(path))) as listener:
        yield listener, path


def test_a_listed_key_is_let_in(guarded: tuple[PeerListener, Path]) -> None:
    listener, _ = guarded
    with connect(listener.endpoint) as connection:
        connection.send(REMOTE, b"hello")
        assert next_frame(listener, connection) == (INCARNATION.encode(), b"hello")
        assert listener.key_of(INCARNATION.encode()) == CONNECTOR.keys.public
        assert listener.send(INCARNATION.encode(), b"welcome")
        assert next_frame(connection, listener)[1] == b"welcome"
        assert connection.refusal == ""
    counts = listener.counts
    assert (counts.num_accepted, counts.num_admitted, counts.num_refused, counts.num_failed) == (1, 1, 0, 0)


def test_an_unlisted_key_hears_no_at_once_and_is_counted(guarded: tuple[PeerListener, Path]) -> None:
    listener, _ = guarded
    with Connection(listener.endpoint, INCARNATION, Credentials(KEYS), LISTENER.keys.public) as connection:
        began_s = time.monotonic()
        connection.send(REMOTE, b"hello")
        _wait(lambda: bool(connection.refusal), connection, listener)
        assert time.monotonic() - began_s < 3  # and not when a peer is given up
        assert f"does not admit this agent's key {KEYS.public}" in connection.refusal
        assert "allowed_keys_file" in connection.refusal
    assert listener.counts.num_refused >= 1
    assert listener.counts.num_admitted == 0
    assert listener.dropped == 0  # nothing of it came as far as that
    assert f"refused a decode agent at 127.0.0.1: its key {KEYS.public}" in listener.news()[0]
    assert listener.news() == []


def test_a_key_is_added_without_a_restart(guarded: tuple[PeerListener, Path]) -> None:
    listener, path = guarded
    path.write_text(f"{CONNECTOR.keys.public}\n{KEYS.public}\n")
    assert listener.news() == [f"allowed_keys_file: {path}: 2 keys"]
    with Connection(listener.endpoint, INCARNATION, Credentials(KEYS), LISTENER.keys.public) as connection:
        connection.send(REMOTE, b"hello")
        assert next_frame(listener)[1] == b"hello"


def test_a_key_is_struck_off_without_a_restart(guarded: tuple[PeerListener, Path]) -> None:
    """Also where its connection stands already."""
    listener, path = guarded
    with connect(listener.endpoint) as connection:
        connection.send(REMOTE, b"hello")
        next_frame(listener)
        path.write_text("")
        listener.news()
        connection.send(REMOTE, b"still here")
        _wait(lambda: listener.dropped == 1, listener)
    with connect(listener.endpoint) as again:
        _wait(lambda: bool(again.refusal), again, listener)


def test_a_name_belongs_to_the_key_that_used_it_first() -> None:
    with PeerListener("127.0.0.1", 0, LISTENER) as listener, connect(listener.endpoint) as owner:
        owner.send(REMOTE, b"mine")
        assert next_frame(listener)[1] == b"mine"
        with Connection(listener.endpoint, INCARNATION, Credentials(KEYS), LISTENER.keys.public) as thief:
            thief.send(REMOTE, b"stolen")
            _wait(lambda: listener.dropped == 1, listener)
        assert listener.key_of(INCARNATION.encode()) == CONNECTOR.keys.public


def test_names_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.control.peer_channel._MAX_NAMES", 2)
    with PeerListener("127.0.0.1", 0, LISTENER) as listener:
        names = [f"{number:032x}" for number in range(3)]
        for name in names:
            with connect(listener.endpoint, name) as connection:
                connection.send(REMOTE, b"x")
                next_frame(listener)
        assert [bool(listener.key_of(name.encode())) for name in names] == [False, True, True]


def test_another_agent_at_the_address_is_found_out() -> None:
    """One with another key, as after a restart without `key_file`."""
    with (
        PeerListener("127.0.0.1", 0, LISTENER) as listener,
        Connection(listener.endpoint, INCARNATION, CONNECTOR, OTHER) as connection,
    ):
        connection.send(REMOTE, b"secret")
        _wait(lambda: bool(connection.refusal), connection, listener)
        assert f"has not the key {OTHER}" in connection.refusal
        assert listener.counts.num_failed >= 3
        assert listener.counts.num_admitted == listener.dropped == 0


def test_a_connection_goes_to_allowed_keys_only(tmp_path: Path) -> None:
    credentials = Credentials(KEYS, AllowList(_list(tmp_path, LISTENER.keys.public)))
    Connection("tcp://127.0.0.1:1", INCARNATION, credentials, LISTENER.keys.public).close()
    with pytest.raises(ProtocolError, match=r"^key: .* is not in this agent's security.allowed_keys_file"):
        Connection("tcp://127.0.0.1:1", INCARNATION, credentials, OTHER)
    with pytest.raises(ProtocolError, match=r"^key: got '', expected the public key of the agent at tcp"):
        Connection("tcp://127.0.0.1:1", INCARNATION, Credentials(KEYS), "")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_other_hosts_need_an_allow_list(host: str) -> None:
    with pytest.raises(ConfigError, match=r"security.allowed_keys_file: got nothing.*kvxfer keygen"):
        PeerListener(host, 0, LISTENER, allow_wildcard=True, advertise_host="192.0.2.1")


def test_listeners_of_one_process_keep_their_lists_apart(tmp_path: Path) -> None:
    strict = Credentials(LISTENER.keys, AllowList(_list(tmp_path, "")))
    with PeerListener("127.0.0.1", 0, strict) as closed, PeerListener("127.0.0.1", 0, LISTENER) as open_to_all:
        with connect(closed.endpoint) as connection:
            _wait(lambda: bool(connection.refusal), connection, closed, open_to_all)
        with connect(open_to_all.endpoint) as connection:
            connection.send(REMOTE, b"hello")
            assert next_frame(open_to_all, closed)[1] == b"hello"
        assert closed.counts.num_admitted == 0
        assert open_to_all.counts.num_refused == 0
