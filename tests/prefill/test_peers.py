"""What the sending side keeps of its peers, and how it pairs with them."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.control.ids import new_id
from kvxfer.control.messages import PROTOCOL_VERSION, Hello, LegFailed
from kvxfer.errors import PeerLostError, RefusedError
from kvxfer.layout import PoolLayout, Shard
from kvxfer.prefill.pairing import Paired, Prober, Unpaired, check_hello
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.base import Completion, Outcome, Transport, WriteBatch
from tests.prefill.driver import ROW_BYTES, PrefillDriver, pool_layout

INCARNATION = "0" * 32


def test_ended_legs_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long transfer holds the floor down; thousands of short ones beside it are no live legs."""
    monkeypatch.setattr("kvxfer.prefill.peers.MAX_LEGS_PER_PEER", 4)
    driver = PrefillDriver()
    peer = driver.pair()
    long = driver.ticket()
    driver.grant(peer, long, 4, generation=1, floor=1)
    for generation in range(2, 12):
        transfer = driver.ticket()
        driver.submit(transfer, 0, 0)
        driver.grant(peer, transfer, 0, generation=generation, floor=1)
        assert driver.kinds(transfer)[-1] is EventKind.SENT
    assert len(driver.core.peers[peer].legs) == 4
    driver.submit(long, 0, 4)
    driver.end_gathers()
    driver.credit(peer, long, 0)
    driver.end_write()
    assert driver.kinds(long)[-1] is EventKind.SENT


def test_more_live_legs_than_the_cap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.prefill.peers.MAX_LEGS_PER_PEER", 2)
    driver = PrefillDriver()
    peer = driver.pair()
    for generation in range(1, 4):
        driver.grant(peer, driver.ticket(), 4, generation=generation)
    (failed,) = driver.to(peer, LegFailed)
    assert (failed.generation, failed.reason) == (3, Reason.PEER_REFUSED)


def _hello(layout: PoolLayout | None = None, incarnation: str | None = None, **fields: object) -> Hello:
    values: dict[str, object] = {
        "incarnation": incarnation or new_id(),
        "expected_incarnation": INCARNATION,
        "pool": new_id(),
        "layout": layout or pool_layout(),
        "dst_rank": 0,
        "dst_world": 1,
        "transport": "loopback",
        "metadata": b"",
        "region_id": 1,
        "region_bytes": 4 * 64 + 4096,
        "slot_bytes": 64,
        "num_slots": 4,
        "probe_offset_bytes": 4 * 64,
        "probe_bytes": 4096,
    }
    return Hello(**{**values, **fields})  # type: ignore[arg-type]


def _check(hello: Hello, layout: PoolLayout | None = None, slot_bytes: int = 64) -> None:
    check_hello(
        hello, incarnation=INCARNATION, transport="loopback", layout=layout or pool_layout(), slot_bytes=slot_bytes
    )


@pytest.mark.parametrize(
    ("hello", "field", "reason", "detail"),
    [
        (
            _hello(version=PROTOCOL_VERSION + 1),
            "version",
            Reason.PEER_REFUSED,
            f"got {PROTOCOL_VERSION + 1}, expected {PROTOCOL_VERSION}",
        ),
        (_hello(expected_incarnation="1" * 32), "incarnation", Reason.STALE, "is now 0000"),
        (_hello(transport="nixl"), "transport", Reason.LAYOUT_MISMATCH, "got 'nixl', expected 'loopback'"),
        (_hello(num_slots=80), "region_bytes", Reason.PEER_REFUSED, "beyond"),
        (_hello(probe_offset_bytes=1000), "region_bytes", Reason.PEER_REFUSED, "beyond"),
        (_hello(slot_bytes=ROW_BYTES - 1), "slot_bytes", Reason.LAYOUT_MISMATCH, "at least a row of 8"),
        (_hello(pool_layout(Shard(size=2))), "layout", Reason.LAYOUT_MISMATCH, "dst_world: got 1, expected at least"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_field(hello: Hello, field: str, reason: Reason, detail: str) -> None:
    """At pairing, once, and not in each request."""
    _check(_hello())
    with pytest.raises(RefusedError) as refused:
        _check(hello)
    assert (refused.value.field, refused.value.reason) == (field, reason)
    assert detail in refused.value.detail


def test_a_peer_of_another_run_is_told_so_whether_there_is_a_worker_or_not() -> None:
    for hello, reason in ((_hello(), Reason.WORKER_LOST), (_hello(expected_incarnation="1" * 32), Reason.STALE)):
        with pytest.raises(RefusedError) as refused:
            check_hello(hello, incarnation=INCARNATION, transport="loopback", layout=None, slot_bytes=64)
        assert refused.value.reason is reason


def test_own_slots_smaller_than_a_row_are_refused_at_pairing() -> None:
    with pytest.raises(RefusedError, match="slot_bytes"):
        _check(_hello(), slot_bytes=ROW_BYTES - 1)


class _Engine:
    """A transport that only numbers its writes; `lost` makes it refuse them."""

    def __init__(self) -> None:
        self.batches: list[WriteBatch] = []
        self.lost = False

    def drop_peer(self, peer: str) -> None: ...

    def add_peer(self, peer: str, metadata: bytes) -> None: ...

    def path(self, peer: str) -> str:
        return f"wire to {peer[:4]}"

    def submit_write(self, peer: str, batch: WriteBatch) -> int:
        if self.lost:
            raise PeerLostError(f"{peer} is gone")
        self.batches.append(batch)
        return len(self.batches)


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.5
        return self.now_s


def _prober() -> tuple[Prober, _Engine]:
    engine = _Engine()
    transport: Transport = engine  # type: ignore[assignment]
    return Prober(transport, lambda: 1 << 20, 2048, _Clock()), engine


def _begin(prober: Prober, hello: Hello) -> Unpaired | None:
    info = check_hello(
        hello, incarnation=INCARNATION, transport="loopback", layout=pool_layout(), slot_bytes=hello.slot_bytes
    )
    return prober.begin(hello, info)


def test_the_path_is_measured_by_three_writes_into_the_probe_area_alone() -> None:
    prober, engine = _prober()
    hello = _hello()
    assert _begin(prober, hello) is None
    assert prober.ended(Completion(1, Outcome.DONE)) is None
    assert prober.ended(Completion(2, Outcome.DONE)) is None
    paired = prober.ended(Completion(3, Outcome.DONE))
    assert isinstance(paired, Paired)
    assert paired.figures.path.startswith("wire to")
    assert paired.figures.descriptor_s == pytest.approx(0.5 / 64)
    assert paired.figures.bytes_per_s == pytest.approx(2048 / 0.5)
    for batch in engine.batches:
        ends = batch.dst_offsets + batch.lengths
        assert int(batch.dst_offsets.min()) >= hello.probe_offset_bytes
        assert int(ends.max()) <= hello.probe_offset_bytes + 2048
        assert np.array_equal(batch.src_addresses - np.uint64(1 << 20), batch.dst_offsets - np.uint64(256))


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNKNOWN])
def test_a_peer_that_cannot_be_written_is_refused(outcome: Outcome) -> None:
    prober, _ = _prober()
    _begin(prober, _hello())
    unpaired = prober.ended(Completion(1, outcome, "no route"))
    assert isinstance(unpaired, Unpaired)
    assert unpaired.refusal.reason is Reason.PEER_UNREACHABLE
    assert "no route" in unpaired.refusal.detail


def test_a_write_that_is_refused_at_once_unpairs() -> None:
    prober, engine = _prober()
    engine.lost = True
    unpaired = _begin(prober, _hello())
    assert isinstance(unpaired, Unpaired)
    assert "is gone" in unpaired.refusal.detail


def test_an_earlier_probe_of_the_same_peer_cannot_end_the_new_one() -> None:
    """It said hello again: the old probe's write ends as failed when the old peer object is dropped."""
    prober, _ = _prober()
    hello = _hello()
    _begin(prober, hello)
    _begin(prober, hello)
    assert prober.ended(Completion(1, Outcome.FAILED, "the peer was dropped")) is None
    for write_id in (2, 3):
        assert prober.ended(Completion(write_id, Outcome.DONE)) is None
    assert isinstance(prober.ended(Completion(4, Outcome.DONE)), Paired)
