"""What every transport does when a side is killed, stopped, restarted or rotated in the middle of writes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from kvxfer.transports._metadata import decode_metadata, encode_metadata
from tests.transports.conftest import FAULT_ENGINES
from tests.transports.peers import POISON, Engine, PeerError, PeerProcess, assert_same_bytes, copied

_MIB = 1 << 20
Lasting = tuple[PeerProcess, PeerProcess]

_BYTES = 16 * _MIB
_BATCHES = [[[i * _MIB, i * _MIB, _MIB]] for i in range(8)]  # the first half; the second is nobody's target
_HALF = 8 * _MIB


def _is_stream(engine: Engine) -> bool:
    """Whether writes wait for the target's process. Copies by the kernel do not."""
    return engine.transport == "mooncake" or bool(engine.environment)


def _write_all(writer: PeerProcess, peer: PeerProcess) -> list[int]:
    write_ids: list[int] = writer.call("write_many", peer=peer.incarnation, batches=_BATCHES)
    return write_ids


def _connect(writer: PeerProcess, *targets: PeerProcess) -> None:
    """Make them known and let one write through, so that what follows meets standing connections."""
    for target in targets:
        writer.knows(target)
        writer.call("write", peer=target.incarnation, entries=[[_HALF, _HALF, 1]])
        assert set(writer.outcomes(1).values()) == {"done"}
        target.bytes[_HALF] = POISON


def _stop_in_mid_transfer(writer: PeerProcess, target: PeerProcess) -> None:
    """Stop `writer`, whose memory is all 1, once its first byte has landed; its reply to `write_many` is due."""
    writer.send("write_many", peer=target.incarnation, batches=_BATCHES)
    give_up_s = time.monotonic() + 10
    while target.bytes[0] != 1 and time.monotonic() < give_up_s:
        time.sleep(0.0001)
    writer.stop()
    assert target.bytes[0] == 1


@pytest.fixture(scope="module", params=FAULT_ENGINES)
def lasting_pair(request: pytest.FixtureRequest) -> Iterator[Lasting]:
    engine: Engine = request.param
    with PeerProcess(engine, _BYTES) as writer, PeerProcess(engine, _BYTES) as target:
        yield writer, target
        assert (writer.finish(), target.finish()) == (0, 0)


@pytest.fixture
def lasting(lasting_pair: Lasting) -> Lasting:
    """(writer, target) for tests that leave both alive: connected, and nothing in the target's memory but poison."""
    writer, target = lasting_pair
    _connect(writer, target)
    writer.bytes[:] = 1
    target.bytes[:] = POISON
    return lasting_pair


def test_a_target_that_is_stopped_and_then_killed_harms_no_other(engine: Engine) -> None:
    with (
        PeerProcess(engine, _BYTES) as writer,
        PeerProcess(engine, _BYTES) as victim,
        PeerProcess(engine, _BYTES) as healthy,
    ):
        _connect(writer, victim, healthy)
        writer.bytes[:] = 1
        victim.stop()
        held = _write_all(writer, victim)
        kept = _write_all(writer, healthy)
        ended = writer.outcomes(8 if _is_stream(engine) else 16, timeout_s=1.5)
        assert [ended[write_id] for write_id in kept] == ["done"] * 8
        victim.kill()
        lost = _write_all(writer, victim)
        kept += _write_all(writer, healthy)
        ended |= writer.outcomes(32 - len(ended), timeout_s=20)
        assert [ended[write_id] for write_id in kept] == ["done"] * 16
        if _is_stream(engine):
            lost += held
        assert all(ended[write_id] in ("failed", "unknown") for write_id in lost)
        if writer.call("facts")["failed_write_stops"]:
            assert "unknown" not in ended.values()
        assert (healthy.bytes[:_HALF] == 1).all()
        assert (healthy.bytes[_HALF:] == POISON).all()
        assert (writer.finish(), healthy.finish()) == (0, 0)


def test_a_target_that_was_stopped_before_the_first_write_holds_up_nothing(engine: Engine) -> None:
    with (
        PeerProcess(engine, _BYTES) as writer,
        PeerProcess(engine, _BYTES) as sleeper,
        PeerProcess(engine, _BYTES) as healthy,
    ):
        _connect(writer, healthy)
        metadata = sleeper.call("metadata")
        sleeper.stop()
        started_s = time.monotonic()
        writer.call("add_peer", peer="sleeper", metadata=metadata)
        writer.bytes[:] = 1
        slow = writer.call("write", peer="sleeper", entries=[[0, 0, _HALF]])
        fast = _write_all(writer, healthy)
        ended = writer.outcomes(9 if engine.transport == "loopback" else 8, timeout_s=1.5)
        assert [ended.get(write_id) for write_id in fast] == ["done"] * 8
        writer.call("rotate")
        assert time.monotonic() - started_s < 8
        writer.bytes[:] = 2
        sleeper.go_on()
        ended |= writer.outcomes(9 - len(ended), timeout_s=5)
        # A write that nobody had begun goes out through the new engine object, and reads what is there then.
        assert ended[slow] in ("done", "failed", "unknown")
        if ended[slow] != "done":
            time.sleep(0.5)
            assert not (sleeper.bytes == 2).any()
        assert (sleeper.bytes[_HALF:] == POISON).all()
        assert (writer.finish(), sleeper.finish(), healthy.finish()) == (0, 0, 0)


def test_a_killed_writer_leaves_a_target_that_works(engine: Engine) -> None:
    with PeerProcess(engine, _BYTES) as target, PeerProcess(engine, _BYTES) as successor:
        with PeerProcess(engine, _BYTES) as victim:
            _connect(victim, target)
            _write_all(victim, target)
            victim.kill()
        assert (target.bytes[_HALF:] == POISON).all()
        _connect(successor, target)
        target.bytes[:] = POISON
        expected = copied(successor, target, [[0, _HALF, _HALF]])
        successor.call("write", peer=target.incarnation, entries=[[0, _HALF, _HALF]])
        assert set(successor.outcomes(1).values()) == {"done"}
        assert_same_bytes(target.bytes[_HALF:], expected[_HALF:])
        assert (successor.finish(), target.finish()) == (0, 0)


def test_nothing_of_a_write_is_read_or_lands_after_rotate_though_the_target_was_stopped(lasting: Lasting) -> None:
    writer, target = lasting
    writer.bytes[:] = 1
    target.stop()
    write_ids = _write_all(writer, target)
    ended = writer.outcomes(8, timeout_s=0.7 if _is_stream(writer.engine) else 20)
    assert bool(set(write_ids) - set(ended)) == _is_stream(writer.engine)
    started_s = time.monotonic()
    writer.call("rotate")
    assert time.monotonic() - started_s < 5
    late = writer.outcomes(8 - len(ended), timeout_s=1)
    assert set(ended) | set(late) == set(write_ids)
    assert "done" not in late.values()
    writer.bytes[:] = 2
    target.go_on()
    time.sleep(1)
    assert not (target.bytes == 2).any()
    assert (target.bytes[_HALF:] == POISON).all()
    writer.call("write", peer=target.incarnation, entries=[[0, _HALF, _HALF]])
    assert set(writer.outcomes(1).values()) == {"done"}
    assert (target.bytes[_HALF:] == 2).all()


def test_a_writer_stopped_in_mid_transfer_finishes_it_later(lasting: Lasting) -> None:
    writer, target = lasting
    writer.bytes[:] = 1
    _stop_in_mid_transfer(writer, target)
    time.sleep(0.5)
    writer.go_on()
    assert set(writer.outcomes(8).values() if writer.reply() else ()) == {"done"}
    assert (target.bytes[:_HALF] == 1).all()
    assert (target.bytes[_HALF:] == POISON).all()


def test_what_a_stopped_writer_can_do_to_a_target_that_rotated_is_what_the_limits_say(lasting: Lasting) -> None:
    writer, target = lasting
    writer.bytes[:] = 1
    _stop_in_mid_transfer(writer, target)
    target.call("rotate")
    target.bytes[:] = POISON
    writer.go_on()
    writer.reply()
    writer.outcomes(8, timeout_s=6)
    time.sleep(0.3)
    if target.call("facts")["rotate_stops_peer_writes"]:
        assert (target.bytes == POISON).all()
    # Whatever an engine cannot prevent stays within what the writer was given.
    assert (target.bytes[_HALF:] == POISON).all()
    writer.knows(target)
    writer.call("write", peer=target.incarnation, entries=[[0, _HALF, _HALF]])
    assert set(writer.outcomes(1).values()) == {"done"}
    assert (target.bytes[_HALF:] == 1).all()


def test_a_rotation_costs_healthy_peers_no_write(lasting: Lasting) -> None:
    writer, target = lasting
    writer.bytes[:] = 1
    write_ids = []
    for _ in range(2):
        write_ids += _write_all(writer, target)
        writer.call("rotate")
    write_ids += _write_all(writer, target)
    ended = writer.outcomes(24)
    assert set(ended) == set(write_ids)
    # What was under way may need to be sent again, once; what was queued goes out through the new object.
    assert list(ended.values()).count("done") >= 22
    assert (target.bytes[:_HALF] == 1).all()
    assert (target.bytes[_HALF:] == POISON).all()


def test_writes_to_a_dropped_peer_end_at_once_and_never_as_done(lasting: Lasting) -> None:
    writer, target = lasting
    target.stop()
    write_ids = _write_all(writer, target)
    # Where nothing waits for the stopped process, all end by themselves, and one must not do so just before the drop.
    before = writer.outcomes(8, timeout_s=0.2 if _is_stream(writer.engine) else 20)
    writer.call("drop_peer", peer=target.incarnation)
    late = writer.outcomes(8 - len(before), timeout_s=1)
    assert bool(late) == _is_stream(writer.engine)
    assert set(before) | set(late) == set(write_ids)
    assert "done" not in late.values()
    with pytest.raises(PeerError, match="PeerLostError"):
        writer.call("write", peer=target.incarnation, entries=[[0, 0, 1]])
    target.go_on()
    _connect(writer, target)


def _fails(writer: PeerProcess, metadata: str) -> bool:
    """Whether what `metadata` describes cannot be written to."""
    try:
        writer.call("add_peer", peer="stale", metadata=metadata)
    except PeerError as error:
        return error.kind == "PeerLostError"
    writer.call("write", peer="stale", entries=[[0, 0, 8]])
    return set(writer.outcomes(1).values()) <= {"failed", "unknown"}


def test_a_restarted_target_is_a_new_peer_under_the_same_name(engine: Engine) -> None:
    with PeerProcess(engine, _BYTES) as writer, PeerProcess(engine, _BYTES) as healthy:
        _connect(writer, healthy)
        with PeerProcess(engine, _BYTES) as target:
            writer.knows(target, "decode-3")
            writer.call("write", peer="decode-3", entries=[[0, 0, _HALF]])
            assert set(writer.outcomes(1).values()) == {"done"}
            stale = target.call("metadata")
            target.kill()
            writer.call("write", peer="decode-3", entries=[[0, 0, _HALF]])
            assert set(writer.outcomes(1).values()) <= {"failed", "unknown"}
        with PeerProcess(engine, _BYTES) as target:
            target.call("metadata")  # it is up
            assert _fails(writer, stale)
            assert (target.bytes == POISON).all()
            writer.bytes[:] = 3
            writer.knows(target, "decode-3")
            writer.call("write", peer="decode-3", entries=[[0, 0, _HALF]])
            _write_all(writer, healthy)
            assert set(writer.outcomes(9).values()) == {"done"}
            assert (target.bytes[:_HALF] == 3).all()
            assert (healthy.bytes[:_HALF] == 3).all()
            assert target.finish() == 0
        assert (writer.finish(), healthy.finish()) == (0, 0)


@pytest.mark.mooncake
def test_mooncake_starts_afresh_for_another_process_behind_a_known_session() -> None:
    # The system keeps a dead process's ports closed for a minute: the successor is played by metadata here.
    engine = Engine("mooncake")
    with PeerProcess(engine, _BYTES) as writer, PeerProcess(engine, _BYTES) as target:
        _connect(writer, target)
        before = writer.call("metadata")
        parsed = decode_metadata(bytes.fromhex(target.call("metadata")), "mooncake")
        successor = encode_metadata(msgspec.structs.replace(parsed, endpoint="successor"))
        writer.call("add_peer", peer="successor", metadata=successor.hex())
        assert writer.call("metadata") != before
        writer.bytes[:] = 4
        for peer in ("successor", target.incarnation):
            target.bytes[:] = POISON
            writer.call("write", peer=peer, entries=[[0, 0, _HALF]])
            assert set(writer.outcomes(1).values()) == {"done"}
            assert (target.bytes[:_HALF] == 4).all()
        assert (writer.finish(), target.finish()) == (0, 0)
