"""A worker's pool as a torch tensor, filled and compared where it lies."""

from __future__ import annotations

import functools
import threading

import numpy as np
import torch

from kvxfer.cli.protocol import Expected, PatternRows, RowSource
from kvxfer.cli.rows import Offsets, describe_difference, owned_rows, pattern_windows
from kvxfer.errors import KvxferError
from kvxfer.layout import Group, Placement, PoolLayout, Shard
from kvxfer.streams.device import DevicePool

_lock = threading.Lock()


class TorchPool:
    """`[num_bytes]` uint8 on a device. Every method waits for the device before it returns."""

    def __init__(self, num_bytes: int, fill: int, device: str) -> None:
        """Raises `KvxferError` where the device is not there."""
        if device == "cuda":
            if not torch.cuda.is_available():
                raise KvxferError("--device cuda: got no CUDA device, expected one: run without --device cuda")
            with _lock:  # members of a crew share the device's context
                base_device_bytes()
        self._device = torch.device(device)
        self._tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._image: tuple[tuple[PoolLayout, int, dict[str, Expected]], torch.Tensor] | None = None
        self.fill(fill)

    @property
    def handle(self) -> DevicePool:
        """The tensor's memory."""
        return DevicePool.of(self._tensor)

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

    def device_bytes(self) -> int:
        """Memory of the device beyond that of this process's tensors and of what it had before the first pool."""
        if self._device.type == "cpu":
            return 0
        return used_device_bytes() - base_device_bytes()

    def close(self) -> None:
        """Give the memory back."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._image = None

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


def used_device_bytes() -> int:
    """Memory of the device that is taken, without what torch has taken for tensors."""
    free_bytes, all_bytes = torch.cuda.mem_get_info()
    return all_bytes - free_bytes - torch.cuda.memory_reserved()


@functools.cache
def base_device_bytes() -> int:
    """`used_device_bytes` once the context is there and torch has loaded the kernels that workers of the bench use."""
    ones = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    torch.mm(ones, ones)
    few = torch.full((64,), 1, dtype=torch.uint8, device="cuda")
    spots = torch.arange(4, device="cuda")[:, None] + torch.arange(2, device="cuda")
    few[spots] = few[spots]
    torch.equal(few, torch.full_like(few, 1))
    torch.cuda.current_stream().synchronize()
    return used_device_bytes()
