"""Everything here that is marked `gpu` needs one; without it is skipped, and counted. Each such test has a time limit:
`limit_s` of its mark, or `LIMIT_S`."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.limits import LIMIT_S, limit

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_WARM_UP_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and not _INTERPRETED:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and Triton compiled rather than interpreted"))


@pytest.fixture(scope="session")
def stderr_fd(pytestconfig: pytest.Config) -> Iterator[int]:
    """Where the run itself writes, whatever of a test is captured."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        fd = os.dup(2)
    yield fd
    os.close(fd)


@pytest.fixture(scope="session")
def kernels(stderr_fd: int) -> None:
    """Compiled and loaded, which takes seconds, before any test's time begins."""
    from kvxfer.streams.cuda_track import load_kernels

    with limit(_WARM_UP_S, stderr_fd):
        load_kernels(0)


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("gpu")
    if mark is None:
        yield
        return
    request.getfixturevalue("kernels")
    with limit(mark.kwargs.get("limit_s", LIMIT_S), request.getfixturevalue("stderr_fd")):
        yield
