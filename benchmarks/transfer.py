"""The tables of docs/performance.md: both engines, pulls, mode auto beside the modes it chooses from, checksums.

`python -m benchmarks.transfer [engines|pull|auto|verify]...`; all by default. Cases of a table run one after another,
in rounds, so that other work on the machine hits all of them alike; every byte of every transfer is compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace

from kvxfer.cli.bench_transfer import TransferResult, run_case
from kvxfer.cli.output import Steps
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.ops.config import TransferMode

_CASE = TransferCase(
    transport="nixl",
    mode="packed",
    num_tokens=2048,
    num_layers=61,
    row_bytes=1152,
    page_tokens=64,
    pages="shuffled",
    num_ranks=4,
    interleave=1,
    chunk_tokens=8192,
    num_repeats=5,
)
_SLOTS = ((64, 1 << 20), (16, 4 << 20), (4, 16 << 20))
_AUTO_TOKENS = (64, 512, 4096, 32768)
_MODES: tuple[TransferMode, ...] = ("auto", "p2p", "packed", "raw")
_NUM_ROUNDS = 2


def measure(cases: Sequence[TransferCase], num_rounds: int = _NUM_ROUNDS) -> list[list[TransferResult]]:
    """The results of each case, one for each round."""
    results: list[list[TransferResult]] = [[] for _ in cases]
    for _ in range(num_rounds):
        for case, found in zip(cases, results, strict=True):
            result = run_case(case, Steps())
            assert not result.problems, result.problems
            found.append(result)
    return results


def transfer_s(results: Sequence[TransferResult]) -> tuple[float, float]:
    """Median and best over all rounds."""
    elapsed_s = [move.elapsed_s for result in results for move in result.moves]
    return statistics.median(elapsed_s), min(elapsed_s)


def contiguous_s(results: Sequence[TransferResult]) -> float:
    """Median over the rounds of one write of the same bytes by the engine alone."""
    return statistics.median(result.contiguous_s for result in results if result.contiguous_s is not None)


def print_engines() -> None:
    """NIXL and Mooncake, packed with slots of several sizes, and raw."""
    cases = [
        replace(_CASE, transport=transport, mode="packed", num_slots=num_slots, slot_bytes=slot_bytes)
        for transport in ("nixl", "mooncake")
        for num_slots, slot_bytes in _SLOTS
    ]
    cases += [replace(_CASE, transport=transport, mode="raw", num_repeats=2) for transport in ("nixl", "mooncake")]
    _say(f"\n{_describe(_CASE)}\n")
    _say("| engine | mode | slots | ms | best ms | GB/s | contiguous GB/s | efficiency | descriptors |")
    _say("|---|---|---|---|---|---|---|---|---|")
    for case, results in zip(cases, measure(cases), strict=True):
        median_s, best_s = transfer_s(results)
        whole_s = contiguous_s(results)
        _say(
            f"| {case.transport} ({results[0].path}) | {case.mode} | {case.num_slots} x {case.slot_bytes >> 20} MiB "
            f"| {median_s * 1e3:.0f} | {best_s * 1e3:.0f} | {case.num_bytes / median_s / 1e9:.2f} "
            f"| {case.num_bytes / whole_s / 1e9:.2f} | {whole_s / median_s:.2f} "
            f"| {results[0].moves[-1].sent.num_descriptors:,} |"
        )


def print_pull() -> None:
    """Pulls against one contiguous write of NIXL, which takes turns with them."""
    cases = [replace(_CASE, mode="p2p", num_tokens=num_tokens, num_repeats=7) for num_tokens in (2048, 8192)]
    _say(f"\n{_describe(_CASE)}; mode p2p\n")
    _say("| tokens | ms | best ms | GB/s | contiguous NIXL GB/s | times as fast |")
    _say("|---|---|---|---|---|---|")
    for case, results in zip(cases, measure(cases), strict=True):
        median_s, best_s = transfer_s(results)
        whole_s = contiguous_s(results)
        _say(
            f"| {case.num_tokens:,} | {median_s * 1e3:.0f} | {best_s * 1e3:.0f} "
            f"| {case.num_bytes / median_s / 1e9:.2f} | {case.num_bytes / whole_s / 1e9:.2f} "
            f"| {whole_s / median_s:.2f} |"
        )


def print_auto() -> None:
    """Mode auto beside the modes that it chooses from; 16 layers, so that the longest fits into small memories."""
    case = replace(_CASE, num_layers=16)
    _say(f"\n{_describe(case)}\n")
    _say("| tokens | auto ms | p2p ms | packed ms | raw ms | best of the modes / auto, medians | by the best |")
    _say("|---|---|---|---|---|---|---|")
    for num_tokens in _AUTO_TOKENS:
        cases = [replace(case, num_tokens=num_tokens, mode=mode) for mode in _MODES]
        times = [transfer_s(results) for results in measure(cases)]
        medians = [median_s for median_s, _ in times]
        bests = [best_s for _, best_s in times]
        cells = " | ".join(f"{median_s * 1e3:.1f}" for median_s in medians)
        _say(f"| {num_tokens:,} | {cells} | {min(medians[1:]) / medians[0]:.2f} | {min(bests[1:]) / bests[0]:.2f} |")


def print_verify() -> None:
    """Packed transfers with and without `verify = "full"`, in turn, round by round."""
    case = replace(_CASE, num_tokens=8192, num_repeats=4)
    off, full = measure([case, replace(case, verify="full")], num_rounds=4)
    _say(f"\n{_describe(case)}; NIXL ({off[0].path}), packed\n")
    _say("| verify | ms | best ms | GB/s | goodput lost, medians | by the best | rounds |")
    _say("|---|---|---|---|---|---|---|")
    (off_s, best_off_s), (full_s, best_full_s) = transfer_s(off), transfer_s(full)
    rounds = [1 - without.elapsed_s / with_.elapsed_s for without, with_ in zip(off, full, strict=True)]
    _say(f"| off | {off_s * 1e3:.0f} | {best_off_s * 1e3:.0f} | {case.num_bytes / off_s / 1e9:.2f} | | | |")
    _say(
        f"| full | {full_s * 1e3:.0f} | {best_full_s * 1e3:.0f} | {case.num_bytes / full_s / 1e9:.2f} "
        f"| {1 - off_s / full_s:.0%} | {1 - best_off_s / best_full_s:.0%} "
        f"| {', '.join(f'{lost:.0%}' for lost in rounds)} |"
    )


def _describe(case: TransferCase) -> str:
    return (
        f"{case.num_tokens} tokens x {case.num_layers} layers x {case.row_bytes} B, DCP {case.num_ranks}, "
        f"{case.pages} pages of {case.page_tokens}; load before: {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors"
    )


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Print the tables that were asked for."""
    tables = {"engines": print_engines, "pull": print_pull, "auto": print_auto, "verify": print_verify}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(tables)}; all by default")
    names = parser.parse_args().tables
    if unknown := sorted(set(names) - tables.keys()):
        parser.error(f"TABLE: got {', '.join(unknown)}, expected some of {', '.join(tables)}")
    for name in names or tables:
        tables[name]()
    _say(f"\nload after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
