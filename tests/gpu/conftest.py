"""Everything here needs a GPU; without one it is skipped, and counted."""

import os

import pytest
import torch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and not _INTERPRETED:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and Triton compiled rather than interpreted"))
