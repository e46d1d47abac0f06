"""Processor time that a segment costs the agents, however large it is.

    python -m benchmarks.agent_cpu [--placement worker|agent] [--ranks N] [--repeat N] [--json FILE]

One prefill worker feeds `--ranks` decode workers out of host memory. Layers, tokens and chunks are those of a real
transfer, and a slot holds as many rows as 8 MiB hold rows of 1152 bytes, but rows are so short that their bytes cost
next to nothing. Figures are medians over the transfers, for one segment: it is sent by the one prefill agent and
received by one of the decode agents. The threads of an agent share one interpreter: what counts is the whole process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvxfer.cli.bench_transfer import CaseRunner
from kvxfer.cli.ensemble import Move
from kvxfer.cli.harness import ThreadsTime
from kvxfer.cli.protocol import RowPlacement
from kvxfer.cli.transfer_case import TransferCase

_CASE = TransferCase(
    transport="loopback",
    mode="packed",
    num_tokens=32_768,
    num_layers=61,
    row_bytes=16,
    page_tokens=64,
    pages="shuffled",
    num_ranks=8,
    interleave=1,
    chunk_tokens=8192,
    num_repeats=5,
    num_slots=8,
    slot_bytes=28 * 4096,
    wire_gb_s=0.7,
    placement="worker",
)


def make_case(placement: RowPlacement, num_ranks: int, num_repeats: int) -> TransferCase:
    """The case that is measured: almost 300 segments a transfer, on a wire that takes 164 us for each."""
    return replace(_CASE, placement=placement, num_ranks=num_ranks, num_repeats=num_repeats)


def measure(case: TransferCase) -> dict[str, object]:
    """Run the case; the facts of the report. Raises `KvxferError` where it cannot be run."""
    with CaseRunner(case.num_ranks, None) as runner:
        result = runner.run(case)
    return {
        "placement": case.placement,
        "ranks": case.num_ranks,
        "segments": result.moves[-1].sent.num_segments,
        "transfer_ms": result.elapsed_s * 1e3,
        "prefill_us": us_per_segment(result.moves, lambda times: times[:1]),
        "decode_us": us_per_segment(result.moves, lambda times: times[1:]),
        "problems": list(result.problems),
    }


def us_per_segment(
    moves: tuple[Move, ...], pick: Callable[[tuple[ThreadsTime, ...]], tuple[ThreadsTime, ...]]
) -> dict[str, float]:
    """Microseconds a segment of the picked agents together: main threads, all other threads, both."""

    def median(of_agent: Callable[[ThreadsTime], float]) -> float:
        return statistics.median(sum(map(of_agent, pick(move.agent_cpu))) / move.sent.num_segments for move in moves)

    return {
        "main": median(lambda time: time.main_s) * 1e6,
        "others": median(lambda time: time.others_s) * 1e6,
        "all": median(lambda time: time.all_s) * 1e6,
    }


def main() -> int:
    """Run the command; 1 where a byte was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--placement", choices=("worker", "agent"), default=_CASE.placement, help="who moves rows")
    parser.add_argument("--ranks", type=int, default=_CASE.num_ranks, help="decode ranks")
    parser.add_argument("--repeat", type=int, default=_CASE.num_repeats, help="transfers")
    parser.add_argument("--json", type=Path, help="write the facts into this file")
    options = parser.parse_args()
    facts = measure(make_case(options.placement, options.ranks, options.repeat))
    print(f"{facts['segments']} segments a transfer of {facts['transfer_ms']:.0f} ms, in us a segment:")
    print("| agent | main thread | other threads | process |\n|---|---|---|---|")
    for name in ("prefill", "decode"):
        times = facts[f"{name}_us"]
        assert isinstance(times, dict)
        print(f"| {name} | {times['main']:.0f} | {times['others']:.0f} | {times['all']:.0f} |")
    for problem in facts["problems"] if isinstance(facts["problems"], list) else ():
        print(f"WRONG: {problem}")
    if options.json is not None:
        options.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 1 if facts["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
