"""Workers whose pools on the GPU are shared with agents in other processes, and what must lie in a pool after a
transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvxfer.control.client import ChunkPages, DecodeClient, PrefillClient, ReceivePages
from kvxfer.control.handoff import allocate_pool
from kvxfer.layout import Placement, Shard
from kvxfer.streams.device import DevicePool, MappedPool
from tests.gpu.orders import Bytes
from tests.wire_world import Geometry, GroupSpec, make_layout

PAGE_TOKENS, NUM_PAGES = 64, 20
ROW_BYTES, NUM_LAYERS = 1152, 3
LAYOUT = make_layout(
    (GroupSpec("kv", Placement.SHARDED, NUM_LAYERS, ROW_BYTES),), Geometry(PAGE_TOKENS), 2 * NUM_PAGES, Shard()
)
POOL_BYTES = LAYOUT.groups[0].extent_bytes
SRC_PAGES = np.random.default_rng(1).permutation(2 * NUM_PAGES)[:NUM_PAGES]
DST_PAGES = np.random.default_rng(2).permutation(2 * NUM_PAGES)[:NUM_PAGES]
WAIT_S = 20.0
cuda: Any = torch.cuda  # not all of it has types


class Side:
    """A worker's pool: of `allocate_pool` (`vmm`), or a piece in the midst of a tensor of torch's (`legacy`)."""

    def __init__(self, kind: str, seed: int) -> None:
        self._shared: MappedPool | None = None
        if kind == "vmm":
            self._shared = allocate_pool(POOL_BYTES, 0)
            self.tensor = self._shared.tensor()
        else:
            self.tensor = torch.zeros(POOL_BYTES + 8192, dtype=torch.uint8, device="cuda")[4096 : 4096 + POOL_BYTES]
        self.write(contents(seed))

    @property
    def memory(self) -> MappedPool | DevicePool:
        return self._shared or DevicePool.of(self.tensor)

    def write(self, data: Bytes) -> None:
        self.tensor.copy_(torch.from_numpy(data))
        cuda.synchronize()

    def read(self) -> Bytes:
        found: Bytes = self.tensor.cpu().numpy()
        return found

    def close(self) -> None:
        del self.tensor
        if self._shared is not None:
            self._shared.close()


def contents(seed: int) -> Bytes:
    """What a pool holds."""
    return np.random.default_rng(seed).integers(1, 256, POOL_BYTES, dtype=np.uint8)


def moved(src: Bytes, dst: Bytes) -> Bytes:
    """`dst` after a whole transfer out of `src`."""
    expected, group = dst.copy(), LAYOUT.groups[0]
    page_bytes = PAGE_TOKENS * group.row_stride_bytes
    for layer in range(NUM_LAYERS):
        for src_page, dst_page in zip(SRC_PAGES, DST_PAGES, strict=True):
            first = group.base_offset_bytes + layer * group.layer_stride_bytes
            src_at, dst_at = (first + int(page) * group.page_stride_bytes for page in (src_page, dst_page))
            expected[dst_at : dst_at + page_bytes] = src[src_at : src_at + page_bytes]
    return expected


def src_chunk(first_page: int, end_page: int) -> ChunkPages:
    """Some of the pages, as they are submitted."""
    return ChunkPages(first_page * PAGE_TOKENS, end_page * PAGE_TOKENS, SRC_PAGES[first_page:end_page])


def prefill_client(socket_dir: str | Path, side: Side) -> PrefillClient:
    """A worker that shares its pool with the agent there."""
    return PrefillClient.connect(socket_dir, side.memory, LAYOUT, placement="agent", timeout_s=WAIT_S)


def decode_client(socket_dir: str | Path, side: Side) -> DecodeClient:
    """The same on the other side."""
    return DecodeClient.connect(socket_dir, side.memory, LAYOUT, placement="agent", timeout_s=WAIT_S)


def dst_pages() -> dict[str, ReceivePages]:
    """All pages, as they are opened."""
    return {"kv": ReceivePages(0, NUM_PAGES * PAGE_TOKENS, DST_PAGES)}
