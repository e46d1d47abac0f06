"""CUDA's driver on host memory, for tests of streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.streams.fake_cuda import FakeCuda
from tests.streams.installed_cuda import installed


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with installed(FakeCuda(), monkeypatch) as made:
        yield made
