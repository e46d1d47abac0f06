"""Fixtures of the control plane's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.control.handoff_listener import HandoffListener
from kvxfer.memory import HostMemory
from tests.control.core_agent import Agent
from tests.control.pools import POOL_BYTES
from tests.control.waiting import num_descriptors


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with HostMemory.create(POOL_BYTES, "test-pool") as memory:
        yield memory


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[HandoffListener]:
    """A listener; the test fails where a descriptor is left after it."""
    before = num_descriptors()
    listener = HandoffListener(tmp_path)
    yield listener
    listener.close()
    assert num_descriptors() == before
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def agent() -> Agent:
    """The other end of a fresh client core."""
    return Agent()


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No descriptor and no file may be left by any test here."""
    before = num_descriptors()
    yield
    assert num_descriptors() == before
    assert list(tmp_path.iterdir()) == []
