"""The Mooncake adapter against a fake of its engine: the calls that would crash it, and when it leaves a peer alone."""

from __future__ import annotations

import itertools
import threading
import time
import types
from collections.abc import Callable

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.transports import Outcome
from kvxfer.transports import _mooncake_engine as adapter
from kvxfer.transports._engine_thread import EngineError
from kvxfer.transports._metadata import Metadata
from kvxfer.transports._regions import Entries


class FakeTransferEngine:
    """Gives ids, and the status that `script` names for each; asking twice for an ended id fails the test."""

    def __init__(self) -> None:
        self.script: dict[int, int] = {}
        self.ended: set[int] = set()
        self.start_code = 0
        self.next_ids = itertools.count(1)
        self.submitted: list[int] = []
        self.answers = threading.Event()
        self.answers.set()
        self.answer = 0

    def send_probe(self, _session: str) -> int:
        assert self.answers.wait(10)
        return self.answer

    def get_first_buffer_address(self, _session: str) -> int:
        return 4096

    def initialize(self, *_: str) -> int:
        return self.start_code

    def get_rpc_port(self) -> int:
        return 15000

    def transfer_submit_write(self, _session: str, _src: int, _dst: int, _length: int) -> int:
        self.submitted.append(next(self.next_ids))
        return self.submitted[-1]

    def transfer_check_status(self, entry_id: int) -> int:
        assert entry_id not in self.ended, f"entry {entry_id} was asked for after its end: the real engine crashes"
        status = self.script.get(entry_id, 0)
        if status != 0:
            self.ended.add(entry_id)
        return status


@pytest.fixture
def fake() -> FakeTransferEngine:
    return FakeTransferEngine()


MakeEngine = Callable[[], adapter.MooncakeEngine]


@pytest.fixture
def make_engine(fake: FakeTransferEngine) -> MakeEngine:
    module = types.ModuleType("fake")
    module.TransferEngine = lambda: fake  # type: ignore[attr-defined]
    return lambda: adapter.MooncakeEngine(module, "me-1", "127.0.0.1", adapter.MooncakeOptions())


def _peer(endpoint: str, session: bytes = b"10.0.0.1:15000") -> Metadata:
    return Metadata("mooncake", endpoint, [], engine=session)


def _entries(count: int) -> Entries:
    return Entries(np.ones((count, 3), dtype=np.uint64))


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "mooncake-ask":
            thread.join(10)


def _post(engine: adapter.MooncakeEngine, count: int) -> int:
    give_up_s = time.perf_counter() + 10
    while not engine.is_ready("p") and time.perf_counter() < give_up_s:
        time.sleep(0.001)
    return engine.post("p", _entries(count))


def test_entries_are_asked_for_until_their_end_and_never_again(
    fake: FakeTransferEngine, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))
    token = _post(engine, 4)
    assert not engine.check(token)
    fake.script = {1: 1, 2: 1}
    assert not engine.check(token)
    fake.script |= {3: 1, 4: 1}
    assert engine.check(token)


def test_a_failed_entry_makes_the_whole_post_unknown_and_its_others_are_let_go(
    fake: FakeTransferEngine, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))
    token = _post(engine, 4)
    fake.script = {1: 1, 2: -1}
    with pytest.raises(EngineError, match="status -1") as raised:
        engine.check(token)
    assert raised.value.outcome is Outcome.UNKNOWN
    fake.script |= {3: 1}
    _post(engine, 1)
    fake.script |= {4: 1}
    _post(engine, 1)
    assert fake.ended >= {1, 2, 3, 4}


def test_one_failure_closes_nothing_and_more_in_a_row_back_off(
    fake: FakeTransferEngine, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("kvxfer.transports._mooncake_engine.time.monotonic", lambda: now_s[0])
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))

    def fail_once() -> None:
        token = _post(engine, 1)
        fake.script[fake.submitted[-1]] = -1
        with pytest.raises(EngineError, match="status -1"):
            engine.check(token)

    fail_once()
    fail_once()
    with pytest.raises(EngineError, match=r"2 writes in a row .* not tried for 0.1 s") as raised:
        _post(engine, 1)
    assert raised.value.outcome is Outcome.FAILED
    now_s[0] += 0.11
    fail_once()
    now_s[0] += 0.15
    with pytest.raises(EngineError, match="3 writes in a row"):
        _post(engine, 1)
    now_s[0] += 60.0
    token = _post(engine, 1)
    fake.script[fake.submitted[-1]] = 1
    assert engine.check(token)
    fail_once()
    _post(engine, 1)


def test_a_peer_that_gives_no_sign_of_life_is_never_posted_to(
    fake: FakeTransferEngine, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_ANSWER_S", 0.05)
    fake.answers.clear()
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))
    assert not engine.is_ready("p")
    with pytest.raises(EngineError, match=r"does not answer \(code None\)") as raised:
        _post(engine, 1)
    assert raised.value.outcome is Outcome.FAILED
    assert fake.submitted == []
    fake.answers.set()
    _wait_for_threads()
    assert _post(engine, 1)


def test_a_peer_that_refuses_is_asked_again_by_the_next_write(
    fake: FakeTransferEngine, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))
    fake.answer = -102
    with pytest.raises(EngineError, match=r"does not answer \(code -102\)"):
        _post(engine, 1)
    fake.answer = 0
    assert _post(engine, 1)


def test_a_successor_is_given_a_chance_at_once(fake: FakeTransferEngine, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))
    for _ in range(2):
        token = _post(engine, 1)
        fake.script[fake.submitted[-1]] = -1
        with pytest.raises(EngineError):
            engine.check(token)
    engine.add_peer("p", _peer("p-2", b"10.0.0.1:15001"))
    assert _post(engine, 1)


def test_a_queue_full_of_abandoned_entries_is_left_to_drain(fake: FakeTransferEngine, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))
    for _ in range(adapter.MAX_PEER_ENTRIES // adapter.MAX_POST_ENTRIES + 1):
        engine.abandon(_post(engine, adapter.MAX_POST_ENTRIES))
    with pytest.raises(EngineError, match="still holds 640 entries") as raised:
        _post(engine, 1)
    assert raised.value.outcome is Outcome.FAILED
    fake.script = dict.fromkeys(fake.submitted, -1)
    assert _post(engine, 1)


def test_only_another_process_behind_a_known_session_makes_the_object_stale(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert not engine.is_stale_for(_peer("p-1"))
    engine.add_peer("p", _peer("p-1"))
    assert not engine.is_stale_for(_peer("p-1"))
    assert not engine.is_stale_for(_peer("p-2", b"10.0.0.1:15001"))
    assert engine.is_stale_for(_peer("p-2"))


def test_a_peer_that_comes_back_is_not_queued_behind_what_was_given_up(
    fake: FakeTransferEngine, make_engine: MakeEngine
) -> None:
    """Entries of a dead connection leave the queue one by one, seconds apart; another session has its own queue."""
    engine = make_engine()
    engine.add_peer("p", _peer("p-1"))
    engine.abandon(_post(engine, 4))
    engine.drop_peer("p")
    assert engine.is_stale_for(_peer("p-1"))
    assert not engine.is_stale_for(_peer("q-1", b"10.0.0.1:15001"))
    engine.add_peer("p", _peer("p-1"))
    fake.script = dict.fromkeys(fake.submitted, -1)
    _post(engine, 1)
    assert not engine.is_stale_for(_peer("p-1"))


@pytest.mark.parametrize(
    "session", [b"", b"host:1", b"10.0.0.1", b"10.0.0.1:0", b"10.0.0.1:65536", b"[::1]:1", b"\xff\xfe:1"]
)
def test_a_session_that_is_no_address_is_refused(make_engine: MakeEngine, session: bytes) -> None:
    with pytest.raises(EngineError, match="expected ADDRESS:PORT"):
        make_engine().add_peer("p", _peer("p-1", session))


def test_an_engine_that_does_not_start_says_so(fake: FakeTransferEngine, make_engine: MakeEngine) -> None:
    fake.start_code = -1
    with pytest.raises(TransportError, match=r"does not start at 127.0.0.1 with tcp: it returned -1"):
        make_engine()
