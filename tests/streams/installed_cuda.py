"""Puts a `FakeCuda` where row streams look for CUDA's driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import kvxfer.kernels.moves
from kvxfer.kernels._compiled import CompiledKernel
from kvxfer.kernels.moves import CompiledMove
from kvxfer.streams import cuda_marks, cuda_track, driver, staged_stream
from tests.streams.fake_cuda import FakeCuda


@contextmanager
def installed(made: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Have row streams use `made`, with kernels that it knows."""
    for module in (driver, cuda_marks, cuda_track, staged_stream):
        monkeypatch.setattr(module, "cuda", lambda: made)
    parameters = {"stage": 11, "check": 5, "move": 7}
    compiled = CompiledMove(
        *(CompiledKernel(f"{name} cubin".encode(), name, number, 64, 0) for name, number in parameters.items())
    )
    monkeypatch.setattr(kvxfer.kernels.moves, "compile_move_rows", lambda _capability: compiled)
    for cached in (driver.gpu, cuda_track.load_kernels):
        cached.cache_clear()
    yield made
    made.cuStreamDestroy(0)
    for stream in made.all_streams:
        stream.join(10)
        assert not stream.is_alive()
    for cached in (driver.gpu, cuda_track.load_kernels):
        cached.cache_clear()
