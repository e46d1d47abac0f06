"""A worker that computes without pause: matrix products on a stream of its own, a few batches ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

_NUM_AHEAD = 2
"""Batches that are enqueued and not done: the GPU never waits for the thread that enqueues them."""


@dataclass(frozen=True, slots=True)
class _Kind:
    dim: int
    batch_size: int


_KINDS = {"long": _Kind(4096, 8), "short": _Kind(1024, 256)}  # about 2 ms a batch on an H200


@dataclass(frozen=True, slots=True)
class Mark:
    """A batch that was enqueued: products up to its end, and the event after it."""

    num_products: int
    event: torch.cuda.Event


class Products:
    """Products of square bf16 matrices: `long` of 4096 x 4096, `short` of 1024 x 1024."""

    def __init__(self, kind: Literal["long", "short"]) -> None:
        self._kind = _KINDS[kind]
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._left, self._right, self._out = (
            torch.ones(self._kind.dim, self._kind.dim, dtype=torch.bfloat16, device="cuda") for _ in range(3)
        )
        torch.cuda.current_stream().synchronize()
        self._num_products = 0
        self._ahead: deque[Mark] = deque()
        self._last_done: Mark | None = None

    def step(self) -> None:
        """Enqueue a batch, after waiting until few are ahead."""
        while len(self._ahead) >= _NUM_AHEAD:
            self._ahead[0].event.synchronize()
            self._last_done = self._ahead.popleft()
        with torch.cuda.stream(self._stream):
            for _ in range(self._kind.batch_size):
                torch.mm(self._left, self._right, out=self._out)
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        self._num_products += self._kind.batch_size
        self._ahead.append(Mark(self._num_products, event))

    def run_up(self) -> None:
        """Compute until the GPU is busy and `last_done` is recent."""
        for _ in range(2 * _NUM_AHEAD + 1):
            self.step()

    def last_done(self) -> Mark:
        """The last batch that is known to be done. Call `run_up` first."""
        assert self._last_done is not None
        return self._last_done

    def rate_since(self, first: Mark) -> float:
        """Products a second from the end of batch `first` to that of the last one done, on the clock of the GPU."""
        while self.last_done() is first:
            self.step()
        last = self.last_done()
        elapsed_s = float(first.event.elapsed_time(last.event)) * 1e-3
        return (last.num_products - first.num_products) / elapsed_s

    def finish(self) -> None:
        """Wait for what is enqueued."""
        while self._ahead:
            self._ahead[0].event.synchronize()
            self._last_done = self._ahead.popleft()
