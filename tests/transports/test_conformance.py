"""What every transport does, between two processes: exact writes, refused ones, one end for each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.transports.peer_process import strided
from tests.transports.peers import POISON, PeerError, PeerProcess, assert_same_bytes, copied

Pair = tuple[PeerProcess, PeerProcess]


FORMS = pytest.mark.parametrize("contiguous", [False, True], ids=["table", "contiguous"])


@FORMS
def test_one_contiguous_write_is_exact(pair: Pair, contiguous: bool) -> None:
    writer, target = pair
    entries = [[4096, 12345, 3 << 20]]
    expected = copied(writer, target, entries)
    write_id = writer.call("write", peer=target.incarnation, entries=entries, contiguous=contiguous)
    assert writer.outcomes(1) == {write_id: "done"}
    assert_same_bytes(target.bytes, expected)


def test_a_write_that_is_done_has_landed(pair: Pair) -> None:
    writer, target = pair
    whole = [[0, 0, writer.bytes.size]]
    for round_number in range(20):
        writer.bytes[:] = round_number
        writer.call("write", peer=target.incarnation, entries=whole, contiguous=round_number % 2 == 0)
        assert set(writer.outcomes(1).values()) == {"done"}
        assert (target.bytes == round_number).all()


def test_scattered_entries_of_any_length_are_exact(pair: Pair) -> None:
    writer, target = pair
    lengths = [1, 2, 577, 1152, 0, 4095, 4096, 4097, 65536, 70001, 0, 3]
    order = np.random.default_rng(2).permutation(len(lengths)).tolist()
    entries = [[1 + 100_000 * i, 7 + 100_003 * order[i], lengths[i]] for i in range(len(lengths))]
    expected = copied(writer, target, entries)
    writer.call("write", peer=target.incarnation, entries=entries)
    assert set(writer.outcomes(1).values()) == {"done"}
    assert_same_bytes(target.bytes, expected)


@pytest.mark.parametrize(
    ("entries", "contiguous"),
    [([], False), ([[0, 0, 0]], False), ([[0, 0, 0]], True)],
    ids=["no entries", "an empty entry", "an empty contiguous one"],
)
def test_a_write_of_nothing_is_done(pair: Pair, entries: list[list[int]], contiguous: bool) -> None:
    writer, target = pair
    writer.call("write", peer=target.incarnation, entries=entries, contiguous=contiguous)
    assert set(writer.outcomes(1).values()) == {"done"}
    assert (target.bytes == POISON).all()


def test_the_first_and_last_bytes_of_a_region_can_be_written(pair: Pair) -> None:
    writer, target = pair
    num_bytes = target.bytes.size
    entries = [[num_bytes - 5, 0, 5], [0, num_bytes - 3, 3], [0, num_bytes, 0]]
    expected = copied(writer, target, entries)
    writer.call("write", peer=target.incarnation, entries=entries)
    assert set(writer.outcomes(1).values()) == {"done"}
    assert_same_bytes(target.bytes, expected)


_SIZE = 1 << 22


@pytest.mark.parametrize(
    "entry",
    [
        [0, _SIZE, 1],
        [0, _SIZE - 1, 2],
        [0, _SIZE + 1, 0],
        [0, 2**63 - 1, 1],
        [0, 2**64 - 1, 2],
        [0, 0, 2**63],
        [0, 1, 2**64 - 1],
        [_SIZE, 0, 1],
        [_SIZE - 1, 0, 2],
        [-1, 0, 1],
        [-1, 0, 2],
    ],
)
def test_a_batch_with_one_entry_out_of_bounds_writes_nothing(pair: Pair, entry: list[int]) -> None:
    writer, target = pair
    with pytest.raises(PeerError, match=r"BoundsError: entry 1: .* expected a range inside"):
        writer.call("write", peer=target.incarnation, entries=[[0, 0, 100], entry, [200, 200, 100]])
    with pytest.raises(PeerError, match=r"BoundsError: entry 0: .* expected a range inside"):
        writer.call("write", peer=target.incarnation, entries=[entry], contiguous=True)
    assert writer.outcomes(1, timeout_s=0.05) == {}
    assert (target.bytes == POISON).all()


@FORMS
def test_a_region_that_the_peer_does_not_have_is_refused(pair: Pair, contiguous: bool) -> None:
    writer, target = pair
    for region in ([999, _SIZE], [1, _SIZE + 1]):
        with pytest.raises(PeerError, match="BoundsError: got region"):
            writer.call("write", peer=target.incarnation, entries=[[0, 0, 1]], region=region, contiguous=contiguous)
    assert (target.bytes == POISON).all()


@FORMS
def test_an_unknown_peer_is_refused(pair: Pair, contiguous: bool) -> None:
    with pytest.raises(PeerError, match="PeerLostError: got peer nobody"):
        pair[0].call("write", peer="nobody", entries=[[0, 0, 1]], contiguous=contiguous)


def test_metadata_that_is_none_is_refused(pair: Pair) -> None:
    writer, target = pair
    good = bytes.fromhex(target.call("metadata"))
    other = good.replace(b"nixl", b"mixl").replace(b"loopback", b"loopBack").replace(b"mooncake", b"moonCake")
    for bad in (b"", b"\x00" * 40, good[:-1], good + b"\x00", other, b"\x93" * 500):
        with pytest.raises(PeerError, match="ProtocolError: metadata"):
            writer.call("add_peer", peer="liar", metadata=bad.hex())
    with pytest.raises(PeerError, match="PeerLostError"):
        writer.call("write", peer="liar", entries=[[0, 0, 1]])


def test_every_one_of_many_writes_ends_once(pair: Pair) -> None:
    writer, target = pair
    batches = [[[i * 8192, (255 - i) * 8192, 4096], [i * 8192 + 5000, (255 - i) * 8192 + 5000, 7]] for i in range(256)]
    expected = copied(writer, target, [entry for entries in batches for entry in entries])
    write_ids = writer.call("write_many", peer=target.incarnation, batches=batches)
    assert len(set(write_ids)) == 256
    assert writer.outcomes(256) == dict.fromkeys(write_ids, "done")
    assert writer.outcomes(1, timeout_s=0.05) == {}
    assert_same_bytes(target.bytes, expected)


def test_both_sides_may_write_at_once(pair: Pair) -> None:
    first, second = pair
    second.knows(first)
    first.bytes[: 1 << 21], second.bytes[1 << 21 :] = 1, 2
    for one, other, offset in ((first, second, 0), (second, first, 1 << 21)):
        one.send(
            "write_many", peer=other.incarnation, batches=[[[offset + i * 65536] * 2 + [65536]] for i in range(32)]
        )
    first.reply(), second.reply()
    assert set(first.outcomes(32).values()) == set(second.outcomes(32).values()) == {"done"}
    for side in pair:
        assert (side.bytes[: 1 << 21] == 1).all()
        assert (side.bytes[1 << 21 :] == 2).all()


def test_memory_registered_later_is_known_after_newer_metadata(pair: Pair) -> None:
    writer, target = pair
    region = target.call("register_more", num_bytes=8192)
    with pytest.raises(PeerError, match=r"BoundsError: got region .* call add_peer again with newer metadata"):
        writer.call("write", peer=target.incarnation, entries=[[0, 0, 4096]], region=region)
    writer.knows(target)
    writer.bytes[:4096] = 1
    writer.call("write", peer=target.incarnation, entries=[[0, 0, 4096]], region=region)
    assert set(writer.outcomes(1).values()) == {"done"}
    assert target.call("more_sum") == 4096


def test_a_hundred_thousand_entries_in_one_write_are_exact_and_bounded(pair: Pair) -> None:
    writer, target = pair
    shape = [100_000, 24, 41, 37]
    expected = target.bytes.copy()
    for src, dst, length in strided(*shape):
        expected[dst : dst + length] = writer.bytes[src : src + length]
    before = writer.call("resources")["resident_bytes"]
    writer.call("write_strided", peer=target.incarnation, shape=shape)
    assert set(writer.outcomes(1, timeout_s=60).values()) == {"done"}
    assert_same_bytes(target.bytes, expected)
    assert writer.call("resources")["resident_bytes"] - before < 96 << 20


def test_overlapping_and_impossible_registrations_are_refused(pair: Pair) -> None:
    writer, _ = pair
    with pytest.raises(PeerError, match=r"RegistrationError: .* overlap"):
        writer.call("register_odd", address_shift=4096, num_bytes=10, kind="host")
    with pytest.raises(PeerError, match="RegistrationError: got 0 bytes"):
        writer.call("register_odd", address_shift=1 << 40, num_bytes=0, kind="host")
    with pytest.raises(PeerError, match="RegistrationError: got device memory"):
        writer.call("register_odd", address_shift=1 << 40, num_bytes=4096, kind="device")
    with pytest.raises(PeerError, match="RegistrationError: got region 1000000"):
        writer.call("deregister_unknown")


def test_the_path_in_use_is_reported(pair: Pair, request: pytest.FixtureRequest) -> None:
    writer, target = pair
    assert writer.call("path", peer="nobody") in ("unknown", "shared memory")
    writer.call("write", peer=target.incarnation, entries=[[0, 0, 1 << 20]])
    writer.outcomes(1)
    name = request.node.callspec.id
    expected = {"loopback": "shared memory", "nixl": "cma", "mooncake": "tcp"}[name.partition("-")[0]]
    assert writer.call("path", peer=target.incarnation) == expected


def test_counters_add_up(pair: Pair) -> None:
    writer, target = pair
    before = writer.call("facts")
    writer.call("write", peer=target.incarnation, entries=[[0, 0, 100], [200, 200, 50]])
    writer.call("write", peer=target.incarnation, entries=[[0, 0, 1 << 20]], contiguous=True)
    writer.outcomes(2)
    after = writer.call("facts")
    added = [after[key] - before[key] for key in ("num_writes", "num_descriptors", "num_bytes")]
    assert added == [2, 3, 150 + (1 << 20)]


def test_torch_is_not_imported_and_an_idle_process_rests(pair: Pair) -> None:
    for side in pair:
        assert not side.call("facts")["torch"]
        assert side.call("idle_cpu_share", seconds=0.5) < 0.1
