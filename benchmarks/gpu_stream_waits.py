"""What of a worker waits while its row stream waits for an order: part of `benchmarks.gpu_stream`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_stream_agent import Agent, Task
from kvxfer.memory import HostMemory
from kvxfer.streams.cuda_stream import STREAM_PRIORITY, CudaRowStream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.driver import gpu
from kvxfer.streams.ring import OrderCode, Ring

LATE_S = 0.3
NUM_STREAMS = 32  # of each priority: as many as torch makes
SHORT_S = 0.1
cuda: Any = torch.cuda  # not all of it has types


def time_waits(pool: torch.Tensor, agent: Agent) -> dict[str, float]:
    """Milliseconds of what a worker may do while its row stream waits for an order, which comes after `LATE_S`. What
    takes about as long waits for everything on the GPU."""
    values = torch.ones(8, device="cuda", dtype=torch.float64)
    held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    del held
    with HostMemory.create(1 << 20, "bench-small") as small, HostMemory.create(4096, "bench-slot") as slots:

        def second_stream() -> None:
            other = Ring.create(1, 16)
            CudaRowStream(other, DevicePool.of(pool), small).close()
            other.close()

        tries: dict[str, Callable[[], object]] = {
            "allocate": lambda: torch.empty(600 << 20, dtype=torch.uint8, device="cuda"),
            "load a kernel": lambda: torch.hypot(values, values),
            "pin memory": lambda: gpu(0).register(small),
            "unpin memory": lambda: gpu(0).unregister(small),
            "second row stream": second_stream,
            "free": cuda.empty_cache,
            "synchronize stream": lambda: cuda.current_stream().synchronize(),
            "synchronize device": cuda.synchronize,
        }
        taken_ms: dict[str, float] = {}
        ring = Ring.create(1, 16)
        stream = CudaRowStream(ring, DevicePool.of(pool), slots)
        agent.start(ring, Task("skip", len(tries), late_s=LATE_S))
        for number, (name, call) in enumerate(tries.items()):
            stream.enqueue(number)
            ring.set_num_enqueued(number + 1)
            start_s = time.perf_counter()
            call()
            taken_ms[name] = (time.perf_counter() - start_s) * 1e3
            while not ring.is_done(number):
                time.sleep(1e-3)
        while agent.told(1.0) is None:
            pass
        stream.close()
        ring.close()
    return taken_ms


def held_streams(pool: torch.Tensor) -> dict[int, int]:
    """By the priority of a row stream: how many of the worker's streams, of priorities 0 and -1, do not get on while
    that one waits for an order. More than 0 means that streams share a queue of the GPU."""
    values = torch.ones(1 << 16, device="cuda")
    streams = [cuda.default_stream(), *(cuda.Stream(priority=-(idx % 2)) for idx in range(2 * NUM_STREAMS))]
    events = [cuda.Event() for _ in streams]

    def use_all() -> None:
        for stream, event in zip(streams, events, strict=True):
            with cuda.stream(stream):
                values.mul_(2)
                event.record()

    use_all()  # loads the kernel
    held: dict[int, int] = {}
    with HostMemory.create(4096, "bench-slot") as slots:
        for priority in (0, -1, STREAM_PRIORITY, -5):
            ring = Ring.create(1, 16)
            stream = CudaRowStream(ring, DevicePool.of(pool), slots, priority=priority)
            cuda.synchronize()
            stream.enqueue(0)
            use_all()
            time.sleep(SHORT_S)
            held[priority] = sum(not event.query() for event in events)
            ring.order(0, OrderCode.SKIP)
            stream.close()
            ring.close()
    return held
