"""A worker's pool as a torch tensor, filled and compared where it lies."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter

import numpy as np
import torch

from kvxfer.cli.protocol import Expected, PatternRows, RowSource
from kvxfer.cli.rows import Offsets, describe_difference, owned_rows, pattern_windows
from kvxfer.errors import KvxferError
from kvxfer.layout import Group, Placement, PoolLayout, Shard
from kvxfer.streams.device import MappedPool, allocate_pool

_lock = threading.Lock()
_pool_bytes: Counter[torch.device] = Counter()  # of this process, by GPU


class TorchPool:
    """`[num_bytes]` uint8 on a device, for the thread that made it. Every method waits for the device before it
    returns."""

    def __init__(self, num_bytes: int, fill: int, device: str) -> None:
        """`device`: "cpu", or "cuda:1", which becomes this thread's current one. Raises `KvxferError` where it is not
        there."""
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._enter_gpu()
        self._memory = allocate_pool(num_bytes, self._device.index) if self._device.type == "cuda" else None
        if self._memory is None:
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        else:
            # Not of torch's own: what it allocates is never mapped in its own process, where ranks may pull from it.
            self._tensor = self._memory.tensor()
            with _lock:
                _pool_bytes[self._device] += self._memory.handle.mapped_bytes
        self._image: tuple[tuple[PoolLayout, int, dict[str, Expected]], torch.Tensor] | None = None
        self._copy: torch.Tensor | None = None
        self.fill(fill)

    def _enter_gpu(self) -> None:
        num_gpus = torch.cuda.device_count()
        if not num_gpus:
            raise KvxferError("--device cuda: got no CUDA device, expected one: run without --device cuda")
        if self._device.index >= num_gpus:
            raise KvxferError(f"--gpus: got {num_gpus} GPUs here, expected at least {self._device.index + 1}")
        torch.cuda.set_device(self._device)
        with _lock:  # members of a crew share the device's context
            base_device_bytes(self._device)

    @property
    def handle(self) -> MappedPool:
        """The tensor's memory, which lies on a GPU."""
        assert self._memory is not None
        return self._memory

    def fill(self, byte: int) -> None:
        """Overwrite all of it."""
        self._tensor.fill_(byte)
        self._wait()

    def write(self, group: Group, pages: list[int], source: RowSource) -> None:
        """Put the rows of `source` into `pages`."""
        tokens = np.arange(source.num_tokens)
        page_of_token = np.asarray(pages, dtype=np.int64)[tokens // group.page_tokens]
        offsets = page_of_token * group.page_stride_bytes + tokens % group.page_tokens * group.row_stride_bytes
        self._place(self._tensor, group, tokens, offsets, source)
        self._wait()

    def problem(self, layout: PoolLayout, fill: int, groups: dict[str, Expected]) -> str:
        """What differs from what is expected."""
        image = self._expected_image(layout, fill, groups)
        if torch.equal(self._tensor, image):
            return ""
        wrong = torch.nonzero(self._tensor != image)
        offset = int(wrong[0])
        return describe_difference(layout, len(wrong), offset, int(self._tensor[offset]), int(image[offset]))

    def _expected_image(self, layout: PoolLayout, fill: int, groups: dict[str, Expected]) -> torch.Tensor:
        """What the pool shall hold; kept, since every repeat of a case expects the same."""
        if self._image is None or self._image[0] != (layout, fill, groups):
            image = torch.full_like(self._tensor, fill)
            for group in layout.groups:
                if group.name in groups:
                    expected = groups[group.name]
                    owners = layout.shard if group.placement is Placement.SHARDED else Shard()
                    rows = np.array(owned_rows(group, owners, expected.pages), dtype=np.int64).reshape(-1, 2)
                    self._place(image, group, rows[:, 0], rows[:, 1], expected.source)
            self._image = ((layout, fill, groups), image)
        return self._image[1]

    def copy_across(self, num_bytes: int, dst_device_index: int) -> float:
        """Seconds that torch takes to copy the first `num_bytes` to another device of this one's kind, or on it. The
        copy's memory is kept for the next call. Raises `KvxferError` where it is not what it should be."""
        device = torch.device(self._device.type, dst_device_index)
        if self._copy is None or (len(self._copy), self._copy.device) != (num_bytes, device):
            self._copy = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._copy.zero_()
        source = self._tensor[:num_bytes].clone()  # memory of torch's own, as the copy's is
        self._wait()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        start_s = time.monotonic()
        self._copy.copy_(source)
        self._wait()
        elapsed_s = time.monotonic() - start_s
        if not torch.equal(self._copy.to(self._device), source):
            raise KvxferError(f"copy of {num_bytes} bytes to {device}: got other bytes, expected those of the source")
        return elapsed_s

    def device_bytes(self) -> int:
        """Memory of the device beyond that of this process's tensors and of what it had before the first pool."""
        if self._device.type == "cpu":
            return 0
        return used_device_bytes(self._device) - base_device_bytes(self._device)

    def close(self) -> None:
        """Give the memory back."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._image = self._copy = None
        if self._memory is not None:
            self._memory.close()
            with _lock:
                _pool_bytes[self._device] -= self._memory.handle.mapped_bytes
            self._memory = None

    def _place(self, target: torch.Tensor, group: Group, tokens: Offsets, offsets: Offsets, source: RowSource) -> None:
        """Put the row of `tokens[i]` at byte `offsets[i]` of each layer of `group`, which begins at its first one."""
        assert isinstance(source, PatternRows), source
        assert group.placement is not Placement.STATE, group
        columns = torch.arange(source.row_bytes, device=self._device)
        positions = torch.from_numpy(offsets).to(self._device)[:, None] + columns
        block = torch.from_numpy(pattern_windows(source, 0)[0]).to(self._device)
        for layer_idx in range(source.num_layers):
            windows = pattern_windows(source, layer_idx)[1]
            rows = torch.from_numpy(windows[tokens]).to(self._device)[:, None] + columns
            first = group.base_offset_bytes + layer_idx * group.layer_stride_bytes
            target[first + positions] = block[rows]

    def _wait(self) -> None:
        # For this thread's stream alone: other members of a crew may have rows under way.
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def used_device_bytes(device: torch.device) -> int:
    """Memory of a GPU that is taken, without pools and what torch has taken for tensors."""
    free_bytes, all_bytes = torch.cuda.mem_get_info(device)
    return all_bytes - free_bytes - torch.cuda.memory_reserved(device) - _pool_bytes[device]


@functools.cache
def base_device_bytes(device: torch.device) -> int:
    """`used_device_bytes` once the context is there and torch has loaded the kernels that workers of the bench use."""
    ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    torch.mm(ones, ones)
    few = torch.full((64,), 1, dtype=torch.uint8, device=device)
    spots = torch.arange(4, device=device)[:, None] + torch.arange(2, device=device)
    few[spots] = few[spots]
    torch.equal(few, torch.full_like(few, 1))
    torch.cuda.current_stream().synchronize()
    return used_device_bytes(device)
