"""Requests of one entry are posted again; those of others, and those that went wrong, are not."""

from __future__ import annotations

import itertools
from types import ModuleType

import numpy as np
import pytest

from kvxfer.transports import Outcome
from kvxfer.transports._engine_thread import EngineError
from kvxfer.transports._engine_transport import UnreachablePeerError
from kvxfer.transports._nixl_requests import MAX_IDLE_REQUESTS, NixlErrors, NixlRequests
from kvxfer.transports._regions import Entries, OneEntry

_RUNNING, _DONE, _ODD = "running", "done", "odd"


class FakeAgent:
    """Every call has the status `status`, or raises `error`."""

    def __init__(self) -> None:
        self.status = _DONE
        self.error: Exception | None = None
        self.made: dict[int, tuple[object, object, str]] = {}
        self.posted: list[int] = []
        self.released: list[int] = []
        self._handles = itertools.count(1)

    def createXferReq(
        self, _kind: str, src: object, dst: object, endpoint: str, _notice: str, _backends: list[int]
    ) -> int:
        handle = next(self._handles)
        self.made[handle] = (src, dst, endpoint)
        return handle

    def postXferReq(self, handle: int, _notice: str) -> str:
        self.posted.append(handle)
        return self.getXferStatus(handle)

    def getXferStatus(self, handle: int) -> str:
        assert handle not in self.released
        if self.error is not None:
            raise self.error
        return self.status

    def releaseXferReq(self, handle: int) -> None:
        self.released.append(handle)


def _bindings() -> ModuleType:
    module = ModuleType("fake")
    for name in ("Backend", "Cancelled", "InvalidParam", "Mismatch", "NotAllowed", "NotFound", "NotPosted"):
        setattr(module, f"nixl{name}Error", type(name, (Exception,), {}))
    for name in ("NotSupported", "RemoteDisconnect", "RepostActive", "Unknown"):
        setattr(module, f"nixl{name}Error", type(name, (Exception,), {}))
    module.__dict__.update(NIXL_WRITE="write", NIXL_IN_PROG=_RUNNING, NIXL_SUCCESS=_DONE, DRAM_SEG="d", VRAM_SEG="v")
    module.__dict__["nixlXferDList"] = lambda kind, table: (kind, table.tolist())
    return module


BINDINGS = _bindings()


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def requests(agent: FakeAgent) -> NixlRequests:
    return NixlRequests(BINDINGS, agent, 5, NixlErrors(BINDINGS))


def _slot(number: int = 0) -> OneEntry:
    return OneEntry(4096 * number, 8192 * number, 4096, (1,))


def test_a_request_names_what_is_copied_and_in_which_memory(agent: FakeAgent, requests: NixlRequests) -> None:
    requests.post("a", OneEntry(10, 20, 4, (1,), 2, -1))
    requests.post("b", Entries(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint64)))
    assert agent.made == {
        1: (("v", [[10, 4, 2]]), ("d", [[20, 4, 0]]), "a"),
        2: (("d", [[1, 3, 0], [4, 6, 0]]), ("d", [[2, 3, 0], [5, 6, 0]]), "b"),
    }
    assert agent.released == [2], "a table does not come again"


def test_the_same_write_is_posted_again_to_the_same_peer_alone(agent: FakeAgent, requests: NixlRequests) -> None:
    for endpoint, slot in (("a", 0), ("a", 1), ("a", 0), ("b", 0), ("b", 0), ("a", 1)):
        assert requests.post(endpoint, _slot(slot)) is None
    assert agent.posted == [1, 2, 1, 3, 3, 2]
    moved = OneEntry(0, 0, 4096, (2,))
    requests.post("a", moved)
    assert agent.posted[-1] == 4, "the region is another one, though at the same address"


def test_a_request_that_is_under_way_is_left_alone(agent: FakeAgent, requests: NixlRequests) -> None:
    agent.status = _RUNNING
    first, second = requests.post("a", _slot()), requests.post("a", _slot())
    assert (first, second) == (1, 2)
    assert not requests.check(1)
    agent.status = _DONE
    assert requests.check(1)
    assert requests.check(2)
    assert agent.released == [2], "one rests already"
    requests.post("a", _slot())
    assert agent.posted == [1, 2, 1]


@pytest.mark.parametrize("at_post", [True, False])
def test_one_that_went_wrong_is_not_posted_again(agent: FakeAgent, requests: NixlRequests, at_post: bool) -> None:
    requests.post("a", _slot())
    agent.status = _RUNNING
    if not at_post:
        requests.post("a", _slot())
    agent.error = BINDINGS.nixlRemoteDisconnectError("gone")
    with pytest.raises(EngineError, match=r"NIXL (posting|watching) a write: RemoteDisconnect gone") as raised:
        requests.post("a", _slot()) if at_post else requests.check(1)
    assert raised.value.outcome is Outcome.UNKNOWN
    assert (agent.released, requests.faulty) == ([1], {"a"})
    agent.error, agent.status = None, _ODD
    with pytest.raises(EngineError, match="NIXL reported status odd"):
        requests.post("a", _slot())
    assert agent.released == [1, 2]


def test_what_is_abandoned_is_freed_and_its_peer_is_faulty(agent: FakeAgent, requests: NixlRequests) -> None:
    agent.status = _RUNNING
    requests.post("a", _slot())
    requests.abandon(1)
    assert (agent.released, requests.faulty) == ([1], {"a"})


def test_a_peer_that_cannot_be_reached_is_told_apart() -> None:
    errors = NixlErrors(BINDINGS)
    with pytest.raises(UnreachablePeerError), errors.mapping(Outcome.FAILED, "trying"):
        raise BINDINGS.nixlBackendError("no")


def test_requests_that_rest_are_bounded_and_freed(agent: FakeAgent, requests: NixlRequests) -> None:
    for number in range(MAX_IDLE_REQUESTS + 3):
        requests.post("a", _slot(number))
    assert agent.released == [1, 2, 3]
    requests.drop_idle()
    assert sorted(agent.released) == list(range(1, MAX_IDLE_REQUESTS + 4))
    requests.post("a", _slot(MAX_IDLE_REQUESTS))
    requests.close()
    assert sorted(agent.released) == list(range(1, MAX_IDLE_REQUESTS + 5))
