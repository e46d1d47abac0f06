"""Times the merge of partial attention over the ranks of a DCP group: `DcpGroup.combine`, whole and in its parts.

    python -m benchmarks.combine --world N [--json]

One process and one GPU a rank, over NCCL, in replayed CUDA graphs; the medians of the slowest rank. Then one packed
all-to-all against two, output and LSE apart, on a large batch. With `--device cpu` the ranks run eagerly over gloo on
small shapes: that tries the command and says nothing about speed.
"""
# torch leaves its process launcher untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import start_processes

from kvxfer.cli.bench_kernels import graph_us
from kvxfer.decode.dcp import DcpGroup
from kvxfer.decode.exchange import STAGING_BYTES, all_gather, reduce_scatter, tiles
from kvxfer.kernels import A2ALayout, lse_combine, pack_a2a, scale_to_staging, unpack_combine

DTYPE = torch.bfloat16
_NUM_EAGER_CALLS = 5


class Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is timed: all parts at `batches` rows of `heads`, and one collective against two on the wide batch."""

    batches: tuple[int, ...]
    heads: int
    head_dim: int
    wide_batch: int
    wide_heads: int


# The wide batch is vLLM's headline shape for packing output and LSE in one all-to-all.
SHAPES = {
    Device.CUDA: Shapes((1, 8, 32, 128, 512), 128, 512, 8192, 64),
    Device.CPU: Shapes((1, 3), 8, 16, 4, 8),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Something to time; `sent_bytes` is what one rank sends to the others in it."""

    way: str
    name: str
    batch: int
    heads: int
    run: Callable[[], object]
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report; `sent_gbs` is None for a part that sends nothing."""

    way: str
    part: str
    batch: int
    heads: int
    us: float
    sent_gbs: float | None


def partial_attention(batch: int, heads: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, heads, head_dim, dtype=DTYPE, device=device), torch.randn(batch, heads, device=device)


def a2a_parts(group: DcpGroup, batch: int) -> Iterator[Part]:
    """Pack, exchange, combine, and the whole; the receive buffer is filled before the combine is timed."""
    layout = A2ALayout(group.world, batch, group.heads, group.head_dim, DTYPE)
    out, lse = partial_attention(batch, group.heads, group.head_dim, group.device)
    send, recv = (torch.empty(layout.total_bytes, dtype=torch.uint8, device=group.device) for _ in range(2))
    result = torch.empty(batch, layout.heads_per_rank, group.head_dim, dtype=DTYPE, device=group.device)
    sent_bytes = (group.world - 1) * layout.slot_bytes

    def exchange() -> None:
        dist.all_to_all_single(recv, send)

    yield Part("a2a", "pack", batch, group.heads, lambda: pack_a2a(out, lse, send, layout))
    yield Part("a2a", "exchange", batch, group.heads, exchange, sent_bytes)
    yield Part("a2a", "combine", batch, group.heads, lambda: unpack_combine(recv, layout, lse_base="e", out=result))
    yield Part("a2a", "whole", batch, group.heads, lambda: group.combine(out, lse), sent_bytes)


def ag_rs_parts(group: DcpGroup, batch: int) -> Iterator[Part]:
    """Gathering the LSEs, scaling into the staging, reduce-scatter of it, and the whole."""
    world, heads, head_dim = group.world, group.heads, group.head_dim
    out, lse = partial_attention(batch, heads, head_dim, group.device)
    rows_per_tile = max(1, min(batch, STAGING_BYTES // (heads * head_dim * DTYPE.itemsize)))
    staging = torch.empty(rows_per_tile * heads * head_dim, dtype=DTYPE, device=group.device)
    result = torch.empty(batch, heads // world, head_dim, dtype=DTYPE, device=group.device)
    all_lses = torch.empty(world, batch, heads, device=group.device)
    merged_lse = torch.empty_like(lse)

    def scale() -> None:
        for tile in tiles(batch, rows_per_tile):
            rows = staging[: (tile.stop - tile.start) * heads * head_dim].view(world, -1, heads // world, head_dim)
            scale_to_staging(out[tile], all_lses[:, tile], group.rank, rows, lse_base="e", lse_out=merged_lse[tile])

    def scatter() -> None:
        for tile in tiles(batch, rows_per_tile):
            rows = staging[: (tile.stop - tile.start) * heads * head_dim]
            reduce_scatter(result[tile].view(-1), rows)

    others = world - 1
    out_bytes = others * out.nbytes // world
    gather_bytes = others * lse.nbytes
    yield Part("ag_rs", "gather", batch, heads, lambda: all_gather(all_lses.view(-1), lse.view(-1)), gather_bytes)
    yield Part("ag_rs", "scale", batch, heads, scale)
    yield Part("ag_rs", "scatter", batch, heads, scatter, out_bytes)
    yield Part("ag_rs", "whole", batch, heads, lambda: group.combine(out, lse), gather_bytes + out_bytes)


def wide_parts(group: DcpGroup) -> Iterator[Part]:
    """One packed all-to-all against two; apart, output and LSE are sorted by rank with a torch copy each."""
    world, batch, heads, head_dim = group.world, group.max_batch, group.heads, group.head_dim
    layout = A2ALayout(world, batch, heads, head_dim, DTYPE)
    out, lse = partial_attention(batch, heads, head_dim, group.device)
    send, recv = (torch.empty(layout.total_bytes, dtype=torch.uint8, device=group.device) for _ in range(2))
    shape = (world, batch, layout.heads_per_rank, head_dim)
    send_out, recv_out = (torch.empty(shape, dtype=DTYPE, device=group.device) for _ in range(2))
    send_lse, recv_lse = (torch.empty(shape[:3], device=group.device) for _ in range(2))
    sent_bytes = (world - 1) * layout.slot_bytes

    def pack_apart() -> None:
        send_out.copy_(out.view(batch, world, -1, head_dim).transpose(0, 1))
        send_lse.copy_(lse.view(batch, world, -1).transpose(0, 1))

    def exchange_packed() -> None:
        dist.all_to_all_single(recv, send)

    def exchange_apart() -> None:
        dist.all_to_all_single(recv_out, send_out)
        dist.all_to_all_single(recv_lse, send_lse)

    def combine_apart() -> torch.Tensor:
        pack_apart()
        exchange_apart()
        return lse_combine(recv_out, recv_lse, lse_base="e")

    # Two ways to the same result, or their times say nothing.
    torch.testing.assert_close(combine_apart(), group.combine(out, lse))
    yield Part("packed", "pack", batch, heads, lambda: pack_a2a(out, lse, send, layout))
    yield Part("apart", "pack", batch, heads, pack_apart)
    yield Part("packed", "exchange", batch, heads, exchange_packed, sent_bytes)
    yield Part("apart", "exchange", batch, heads, exchange_apart, sent_bytes)
    yield Part("packed", "whole", batch, heads, lambda: group.combine(out, lse), sent_bytes)
    yield Part("apart", "whole", batch, heads, combine_apart, sent_bytes)


def all_parts(shapes: Shapes, device: torch.device) -> Iterator[Part]:
    """Every part in turn, the same on every rank; the tensors of one go before those of the next are made."""
    for backend, parts in (("a2a", a2a_parts), ("ag_rs", ag_rs_parts)):
        group = DcpGroup(
            None,
            shapes.heads,
            shapes.head_dim,
            DTYPE,
            "a2a" if backend == "a2a" else "ag_rs",
            lse_base="e",
            max_batch=max(shapes.batches),
            device=device,
        )
        for batch in shapes.batches:
            yield from parts(group, batch)
    yield from wide_parts(
        DcpGroup(
            None,
            shapes.wide_heads,
            shapes.head_dim,
            DTYPE,
            "a2a",
            lse_base="e",
            max_batch=shapes.wide_batch,
            device=device,
        )
    )


def time_part(part: Part, device: torch.device) -> Row:
    def slowest(us: float) -> float:
        all_us = torch.tensor([us], dtype=torch.float64, device=device)
        dist.all_reduce(all_us, op=dist.ReduceOp.MAX)
        return float(all_us.item())

    part.run()  # connects the ranks, which must neither be timed nor happen while a graph is captured
    us = slowest(graph_us(part.run, slowest) if device.type == "cuda" else eager_us(part.run))
    sent_gbs = part.sent_bytes / us / 1e3 if part.sent_bytes else None
    return Row(part.way, part.name, part.batch, part.heads, us, sent_gbs)


def eager_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_NUM_EAGER_CALLS):
        dist.barrier()
        begin_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin_s) * 1e6)
    return statistics.median(times)


def run_rank(rank: int, world: int, kind: Device, directory: str) -> None:
    """One rank, in a process of its own; rank 0 leaves the report in `directory`."""
    if kind is Device.CUDA:
        torch.cuda.set_device(rank)
        device, library, name = torch.device("cuda", rank), "nccl", torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device, library, name = torch.device("cpu"), "gloo", "CPU"
    dist.init_process_group(library, init_method=f"file://{directory}/store", rank=rank, world_size=world)
    rows = [asdict(time_part(part, device)) for part in all_parts(SHAPES[kind], device)]
    if rank == 0:
        report = {"device": name, "world": world, "library": library, "torch": torch.__version__, "rows": rows}
        Path(directory, "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    dist.destroy_process_group()


def show(report_text: str) -> None:
    report = json.loads(report_text)
    title = f"{report['world']} ranks, {report['library']}, {report['device']}"
    table = Table(title=title)
    for heading in ("batch", "heads", "way", "part", "us", "GB/s sent"):
        table.add_column(heading, justify="left" if heading in ("way", "part") else "right")
    for row in (Row(**each) for each in report["rows"]):
        sent = "" if row.sent_gbs is None else f"{row.sent_gbs:.1f}"
        table.add_row(str(row.batch), str(row.heads), row.way, row.part, f"{row.us:.1f}", sent)
    Console(width=100).print(table)


def main(
    world: Annotated[int, typer.Option(help="Ranks, one process and one GPU each.")],
    device: Annotated[Device, typer.Option(help="cpu: small shapes over gloo, to try the command.")] = Device.CUDA,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time the merge of partial attention over `world` ranks."""
    num_gpus = torch.cuda.device_count()
    if device is Device.CUDA and not 2 <= world <= num_gpus:
        raise typer.BadParameter(
            f"--world: got {world} on a machine with {num_gpus} GPUs, expected at least 2 and a GPU each; "
            "--device cpu tries the command without them"
        )
    with tempfile.TemporaryDirectory() as directory:
        # Ends all ranks and raises the first one's error if one fails.
        start_processes(run_rank, (world, device, directory), nprocs=world, start_method="forkserver")
        report_text = Path(directory, "report.json").read_text(encoding="utf-8")
    if as_json:
        print(report_text)
    else:
        show(report_text)


if __name__ == "__main__":
    typer.run(main)
