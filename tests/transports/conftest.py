"""The transports that the conformance suite runs over, and a pair of processes that its peaceful tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transports.peers import POISON, Engine, PeerProcess, fill_random

ENGINES = [
    pytest.param(Engine("loopback"), id="loopback"),
    pytest.param(Engine("loopback", options=(("num_copy_processes", 2),)), id="loopback-processes"),
    pytest.param(Engine("nixl"), id="nixl", marks=pytest.mark.nixl),
    pytest.param(Engine("mooncake"), id="mooncake", marks=pytest.mark.mooncake),
]
# NIXL behaves quite differently on a stream: what it does between hosts, confined to this one.
FAULT_ENGINES = [
    *ENGINES,
    pytest.param(Engine("nixl", (("UCX_TLS", "tcp"),)), id="nixl-tcp", marks=pytest.mark.nixl),
]


@pytest.fixture(scope="module", params=ENGINES)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    engine: Engine = request.param
    with PeerProcess(engine) as writer, PeerProcess(engine) as target:
        yield writer.knows(target), target
        assert (writer.finish(), target.finish()) == (0, 0)


@pytest.fixture
def pair(shared_pair: tuple[PeerProcess, PeerProcess]) -> tuple[PeerProcess, PeerProcess]:
    """(writer, target) that know each other; the writer's memory is random, the target's all `POISON`."""
    writer, target = shared_pair
    fill_random(writer, seed=1)
    target.bytes[:] = POISON
    return writer, target


@pytest.fixture(params=FAULT_ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """For tests that start, stop and kill processes of their own."""
    found: Engine = request.param
    return found
