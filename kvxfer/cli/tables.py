"""Results of demo and bench as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvxfer.cli.bench_transfer import TransferResult
from kvxfer.cli.demo import NUM_LAYERS, DemoResult


def print_demo(result: DemoResult) -> None:
    """One line a rank, totals, and what to make of them."""
    options = result.options
    table = Table(
        title=f"KV of {result.num_tokens} tokens x {NUM_LAYERS} layers over {options.transport}, {options.mode}"
    )
    for heading in ("rank", "rows", "bytes", "descriptors if raw", "descriptors sent", "ms", "GB/s", "every byte"):
        table.add_column(heading, justify="right")
    for rank in result.ranks:
        table.add_row(
            str(rank.rank),
            f"{rank.num_rows:,}",
            f"{rank.num_bytes:,}",
            f"{rank.descriptors_raw:,}",
            f"{rank.descriptors_sent:,}",
            f"{rank.transfer_s * 1e3:.1f}",
            f"{rank.num_bytes / rank.transfer_s / 1e9:.2f}",
            "differs" if rank.problem else "right",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{sum(rank.num_rows for rank in result.ranks):,}",
        f"{result.num_bytes:,}",
        f"{result.move.sent.num_runs:,}",
        f"{result.move.sent.num_descriptors:,}",
        f"{result.move.elapsed_s * 1e3:.1f}",
        f"{result.num_bytes / result.move.elapsed_s / 1e9:.2f}",
        "right" if result.verified else "differs",
    )
    console = Console()
    console.print(table)
    console.print(
        f"prefill of the model {result.prefill_s:.1f} s; pairing of the agents, once, {result.pair_s * 1e3:.0f} ms"
    )
    for rank in result.ranks:
        if rank.problem:
            console.print(f"rank {rank.rank}: {rank.problem}", markup=False)


def print_transfers(results: list[TransferResult]) -> None:
    """One line a mode; where there are several, how the first compares with each."""
    case = results[0].case
    table = Table(
        title=f"{case.num_tokens} tokens x {case.num_layers} layers x {case.row_bytes} B, DCP {case.num_ranks}, "
        f"interleave {case.interleave}, {case.pages} pages of {case.page_tokens}, {case.transport}"
    )
    headings = ("mode", "ms", "GB/s", "contiguous GB/s", "efficiency", "descriptors", "plan ms", "pack ms", "send ms")
    for heading in (*headings, "scatter ms", "slots MiB", "verified"):
        table.add_column(heading, justify="right")
    facts = [result.as_json() for result in results]
    for fact in facts:
        table.add_row(
            fact["mode"],
            f"{fact['transfer_ms']:.1f}",
            f"{fact['goodput_gb_s']:.3f}",
            "-" if fact["contiguous_gb_s"] is None else f"{fact['contiguous_gb_s']:.3f}",
            "-" if fact["efficiency"] is None else f"{fact['efficiency']:.2f}",
            f"{fact['descriptors_sent']:,}",
            *(f"{fact[key]:.1f}" for key in ("plan_ms", "pack_ms", "send_ms", "scatter_ms")),
            f"{fact['slot_bytes'] / 2**20:.0f}",
            "yes" if fact["verified"] else "NO",
        )
    console = Console()
    console.print(table)
    for fact in facts[1:]:
        console.print(f"{facts[0]['mode']} / {fact['mode']}: {fact['transfer_ms'] / facts[0]['transfer_ms']:.2f}")
    for fact in facts:
        for problem in fact["problems"]:
            console.print(f"{fact['mode']}: {problem}", markup=False)
