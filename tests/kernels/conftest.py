"""Every kernel test runs twice: on the Triton kernel (a GPU, or the interpreter) and on the torch path."""

from types import ModuleType

import pytest
import torch

import kvxfer.kernels
import kvxfer.kernels.reference
from kvxfer.kernels._launch import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture(params=["triton", "torch"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    """`kvxfer.kernels`, whose wrappers launch Triton here, or `kvxfer.kernels.reference`."""
    return kvxfer.kernels if request.param == "triton" else kvxfer.kernels.reference


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and Triton compiled rather than interpreted"))
