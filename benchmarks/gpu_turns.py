"""Gathers by a stream of the agent's own, beside a worker that computes: python -m benchmarks.gpu_turns [--json FILE].

The worker hands its pool over (placement `agent`); another process gathers 8 MiB segments of DCP 8 rows into its slots,
one in flight for each, without a wire. Two processes take turns on a GPU: what is in flight divided by a turn is the
rate. Some 25 s, besides the start of CUDA in each agent and, once, the compilation of the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from benchmarks.needs_gpus import check_gpus
from kvxfer.cli.products import Products
from kvxfer.control.handoff import allocate_pool, hand_over_device
from kvxfer.layout import Group, LayerRange, PoolLayout
from kvxfer.streams.device import DevicePool, MappedPool

POOL_BYTES = 1 << 30
_SECONDS = 1.0
_START_S = 120.0
Busy = Literal["none", "long", "short"]


@dataclass(frozen=True, slots=True)
class Turns:
    """One measurement. `worker_kept` is the share of its products that a worker keeps while the agent gathers."""

    num_slots: int
    slot_kind: str
    pool_kind: str
    busy: Busy
    gb_s: float
    turn_ms: float
    cpu_us: float
    worker_kept: float | None


class Agent:
    """The agent's process, which has this worker's pool. Leaving the context ends it."""

    def __init__(self, pool: MappedPool | DevicePool, num_slots: int, slot_kind: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvxfer-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_turns_agent", self._directory.name, str(num_slots), slot_kind],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._connection, self._ring = hand_over_device(self._directory.name, pool, _layout(), _START_S)
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._directory.cleanup()
            raise

    def gather(self, seconds: float) -> dict[str, Any]:
        """What it says after so long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the agent's process has ended: see above")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._ring.close()
        self._connection.close()
        self._directory.cleanup()


def _layout() -> PoolLayout:
    """Of no meaning here: the agent's part reads the pool as it likes."""
    group = Group(
        name="kv",
        layers=LayerRange(0, 1),
        layer_stride_bytes=POOL_BYTES,
        page_stride_bytes=1152 * 64,
        num_pages=POOL_BYTES // (1152 * 64),
        page_tokens=64,
        row_stride_bytes=1152,
        row_bytes=1152,
    )
    return PoolLayout(groups=(group,), dtype_tag="u8")


def measure(agent: Agent, busy: Busy) -> tuple[dict[str, Any], float | None]:
    """What the agent says, and the share of its products that the worker keeps meanwhile."""
    if busy == "none":
        return agent.gather(_SECONDS), None
    products = Products(busy)
    alone_per_s = _rate(products, lambda: threading.Event().wait(_SECONDS))
    facts: dict[str, Any] = {}
    beside_per_s = _rate(products, lambda: facts.update(agent.gather(_SECONDS)))
    products.finish()
    return facts, beside_per_s / alone_per_s


def _rate(products: Products, wait: Any) -> float:  # noqa: ANN401
    """Products a second while `wait` goes on in a thread that sleeps."""
    products.run_up()
    first = products.last_done()
    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        products.step()
    thread.join()
    return products.rate_since(first)


def run() -> list[Turns]:
    """All measurements, each printed as it is there."""
    print("| slots | pool | busy | GB/s | turn ms | agent us a gather | worker keeps |\n|---|---|---|---|---|---|---|")
    found: list[Turns] = []
    shared, tensor = allocate_pool(POOL_BYTES, 0), torch.ones(POOL_BYTES, dtype=torch.uint8, device="cuda")
    shared.tensor().fill_(1)
    torch.cuda.synchronize()
    pools: dict[str, MappedPool | DevicePool] = {"vmm": shared, "legacy": DevicePool.of(tensor)}
    cases = [(24, "pinned_host", "vmm"), (8, "pinned_host", "legacy"), (24, "device", "vmm")]
    for num_slots, slot_kind, pool_kind in cases:
        with Agent(pools[pool_kind], num_slots, slot_kind) as agent:
            for busy in ("none", "long", "short"):
                facts, kept = measure(agent, busy)
                turns = Turns(num_slots, slot_kind, pool_kind, busy, worker_kept=kept, **facts)
                found.append(turns)
                told_kept = "" if kept is None else f"{kept:.3f}"
                print(
                    f"| {num_slots} {slot_kind} | {pool_kind} | {busy} | {turns.gb_s:.1f} | {turns.turn_ms:.2f} "
                    f"| {turns.cpu_us:.0f} | {told_kept} |",
                    flush=True,
                )
    shared.close()
    return found


def print_goals(found: list[Turns]) -> None:
    """What the figures say of the goals, beside a worker that runs long kernels without pause."""
    print("\n| goal | got | wanted |\n|---|---|---|")
    for turns in found:
        if turns.busy == "long" and turns.num_slots == 24:
            print(f"| GB/s of gathers, 192 MiB of {turns.slot_kind} slots | {turns.gb_s:.1f} | at least 50 |")
            print(f"| worker keeps, {turns.slot_kind} slots | {turns.worker_kept or 0.0:.3f} | at least 0.92 |")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the facts into this file")
    options = parser.parse_args()
    check_gpus(parser, 1)
    found = run()
    print_goals(found)
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(each) for each in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
