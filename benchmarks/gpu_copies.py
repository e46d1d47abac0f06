"""What torch reaches that copies between GPUs: the yardstick of pulls."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

_cuda: Any = torch.cuda  # not all of it has types
_NUM_COPIES = 5


def copied_gbs(pool: torch.Tensor, src_device_index: int) -> float:
    """GB/s of copies as long as `pool`, `[num_bytes]` uint8 on a GPU, into it from another GPU; the median of five."""
    source = torch.ones(pool.numel(), dtype=torch.uint8, device=f"cuda:{src_device_index}")
    taken_s = []
    for _ in range(1 + _NUM_COPIES):  # the first one lets one GPU reach the other
        _cuda.current_stream(source.device).synchronize()
        start_s = time.perf_counter()
        pool.copy_(source)
        for device in (source.device, pool.device):
            _cuda.current_stream(device).synchronize()
        taken_s.append(time.perf_counter() - start_s)
    return pool.numel() / statistics.median(taken_s[1:]) / 1e9
