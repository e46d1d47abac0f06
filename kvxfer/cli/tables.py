"""Results of demo and bench as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvxfer.cli.bench_transfer import TransferResult
from kvxfer.cli.demo import DemoResult
from kvxfer.cli.demo_stage import NUM_LAYERS
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.control.messages import TransferStats
from kvxfer.ops.config import TransferMode


def print_demo(result: DemoResult) -> None:
    """One line a rank, totals, and what to make of them."""
    options = result.options
    way = way_taken(options.mode, result.move.sent)
    table = Table(
        title=f"KV of {result.num_tokens} tokens x {NUM_LAYERS} layers, transport {options.transport}, mode {way}"
    )
    for heading in ("rank", "rows", "MB", "descriptors\nif raw", "descriptors\nsent", "ms", "GB/s", "bytes are"):
        table.add_column(heading, justify="right")
    for rank in result.ranks:
        table.add_row(
            str(rank.rank),
            f"{rank.num_rows:,}",
            f"{rank.num_bytes / 1e6:.2f}",
            f"{rank.descriptors_raw:,}",
            f"{rank.descriptors_sent:,}",
            f"{rank.transfer_s * 1e3:.1f}",
            f"{rank.num_bytes / rank.transfer_s / 1e9:.2f}",
            "wrong" if rank.problem else "right",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{sum(rank.num_rows for rank in result.ranks):,}",
        f"{result.num_bytes / 1e6:.2f}",
        f"{result.move.sent.num_runs:,}",
        f"{result.move.sent.num_descriptors:,}",
        f"{result.move.elapsed_s * 1e3:.1f}",
        f"{result.num_bytes / result.move.elapsed_s / 1e9:.2f}",
        "right" if result.verified else "wrong",
    )
    console = Console()
    console.print(table)
    if result.move.sent.num_rows and not result.move.sent.num_descriptors:
        console.print("no descriptors: the ranks pulled their rows out of the source pool themselves")
    console.print(
        f"prefill of the model {result.prefill_s:.1f} s; pairing of the agents, once, {result.pair_s * 1e3:.0f} ms"
    )
    if result.decoded is not None:
        text = bytes(result.decoded.alone)
        verdict = "the same tokens as" if result.decoded.tokens_match else "OTHER TOKENS THAN"
        console.print(f"decoded over the ranks: {verdict} one process that holds everything: {text!r}", markup=False)
    for rank in result.ranks:
        if rank.problem:
            console.print(f"rank {rank.rank}: {rank.problem}", markup=False)


def way_taken(mode: TransferMode, sent: TransferStats) -> str:
    """The mode, and for `auto` what it chose, which the descriptors tell: none where rows were pulled."""
    if mode != "auto" or sent.num_rows == 0:
        return mode
    if sent.num_descriptors == 0:
        return "auto (chose p2p)"
    if sent.num_segments == sent.num_runs:
        return mode  # packed and raw look alike
    if sent.num_descriptors == sent.num_segments:
        return "auto (chose packed)"
    return "auto (chose raw)" if sent.num_descriptors == sent.num_runs else "auto (ranks differ)"


def print_transfers(results: list[TransferResult]) -> None:
    """One column a mode; where there are several, how the first compares with each."""
    case = results[0].case
    facts = [result.as_json() for result in results]
    path = f" ({results[0].path})" if results[0].path else ""
    table = Table(
        title=f"{case.num_tokens} tokens x {case.num_layers} layers x {case.row_bytes} B, transport {case.transport}"
        f"{path}, DCP {case.num_ranks}, interleave {case.interleave}, {case.pages} pages of {case.page_tokens}"
    )
    table.add_column("mode")
    for result in results:
        table.add_column(way_taken(result.case.mode, result.moves[-1].sent), justify="right")
    for heading, key in _lines(case).items():
        table.add_row(heading, *(_cell(fact[key]) for fact in facts))
    console = Console()
    console.print(table)
    measure = (
        "share of the wire: bytes / its rate / transfer"
        if case.wire_gb_s
        else f"efficiency: goodput / goodput of the {'copy' if case.stays_on_gpus else 'contiguous write'}"
    )
    console.print(
        f"{measure}. ms in all: sums over ranks and segments, which overlap, so they may exceed the transfer."
    )
    if any(fact["bytes"] and not fact["descriptors_sent"] for fact in facts):
        unchecked = ", and no checksum is made of such rows" if case.verify == "full" else ""
        console.print(f"No descriptors sent: the ranks pulled their rows{unchecked}.")
    first = facts[0]
    for fact in facts[1:]:
        ratio = fact["transfer_ms"] / first["transfer_ms"]
        console.print(f"{first['mode']} is {ratio:.2f} times as fast as {fact['mode']}")
    for fact in facts:
        for problem in fact["problems"]:
            console.print(f"{fact['mode']}: {problem}", markup=False)


def _lines(case: TransferCase) -> dict[str, str]:
    """Headings, and the keys of `TransferResult.as_json` beside them, as far as they say something of the case."""
    lines = {"transfer, ms": "transfer_ms", "goodput, GB/s": "goodput_gb_s"}
    if case.wire_gb_s is not None:
        lines |= {"emulated wire, GB/s": "wire_gb_s", "share of the wire": "share_of_wire"}
    else:
        yardstick = "one copy from GPU to GPU" if case.stays_on_gpus else "one contiguous write"
        lines |= {f"{yardstick}, GB/s": "contiguous_gb_s", "efficiency": "efficiency"}
    if case.chunk_tokens < case.num_tokens:
        lines |= {"last submit to landed, ms": "exposed_tail_ms"}
    lines |= {
        "descriptors if raw": "descriptors_raw",
        "descriptors sent": "descriptors_sent",
        "plan, ms": "plan_ms",
        "pack, ms in all": "pack_ms",
        "send, ms in all": "send_ms",
        "scatter, ms in all": "scatter_ms",
        "slots of an agent, bytes": "slot_bytes",
    }
    if case.placement == "worker":
        lines |= {"worker's time for a segment, us": "worker_us_per_segment"}
    if case.busy != "none":
        lines |= {"worker keeps of its products": "worker_rate_kept"}
    if case.device == "cuda":
        lines |= {"memory of the GPU besides pools, bytes": "peak_device_bytes"}
    return lines | {"every byte right": "verified"}


def _cell(value: float | bool | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
