"""The pool of a worker of the demo or bench, in host memory or on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvxfer.cli.protocol import Expected, HandOver, RowSource
from kvxfer.cli.rows import expected_pool, first_difference, write_rows
from kvxfer.errors import KvxferError
from kvxfer.layout import Group, PoolLayout
from kvxfer.memory import HostMemory

if TYPE_CHECKING:
    from kvxfer.streams.device import MappedPool

CONNECT_S = 30.0
"""How long a client may take to connect: a stream of a GPU compiles its kernel before it is ready."""


class WorkerPool(Protocol):
    """A pool. What was written is there for everybody when a method returns."""

    @property
    def handle(self) -> HostMemory | MappedPool:
        """What a client hands over."""
        ...

    def fill(self, byte: int) -> None:
        """Overwrite all of it."""
        ...

    def write(self, group: Group, pages: list[int], source: RowSource) -> None:
        """Put the rows of `source` into `pages` of a group of an unsharded pool."""
        ...

    def problem(self, layout: PoolLayout, fill: int, groups: dict[str, Expected]) -> str:
        """What differs from a pool that holds the expected rows and `fill` everywhere else; empty if nothing does."""
        ...

    def device_bytes(self) -> int:
        """Memory of the GPU that neither the pools of this process nor what it computes take."""
        ...

    def close(self) -> None: ...


class HostPool:
    """A pool in shared memory."""

    def __init__(self, num_bytes: int, fill: int) -> None:
        self.memory = HostMemory.create(num_bytes, "kvxfer-worker-pool")
        self.fill(fill)

    @property
    def handle(self) -> HostMemory:
        """The memory."""
        return self.memory

    def fill(self, byte: int) -> None:
        """Overwrite all of it."""
        self.memory.array[:] = byte

    def write(self, group: Group, pages: list[int], source: RowSource) -> None:
        """Put the rows of `source` into `pages`."""
        write_rows(self.memory.array, group, pages, source)

    def problem(self, layout: PoolLayout, fill: int, groups: dict[str, Expected]) -> str:
        """What differs from what is expected."""
        image = expected_pool(layout, self.memory.num_bytes, fill, groups)
        return first_difference(self.memory.array, image, layout)

    def device_bytes(self) -> int:
        """There is no GPU."""
        return 0

    def close(self) -> None:
        """Free the memory."""
        self.memory.close()


def make_pool(command: HandOver) -> WorkerPool:
    """The pool that a worker is told to create. Raises `KvxferError` where its device is not there."""
    if command.device == "cpu":
        return HostPool(command.pool_bytes, command.fill)
    # Only here: torch takes seconds to import, and workers on the host path do without it.
    try:
        from kvxfer.cli.torch_pool import TorchPool
    except ModuleNotFoundError as error:
        raise KvxferError(
            f"--device cuda needs {error.name}, which is not installed: pip install 'kvxfer[gpu]'"
        ) from error
    return TorchPool(command.pool_bytes, command.fill, f"{command.device}:{command.device_index}")
