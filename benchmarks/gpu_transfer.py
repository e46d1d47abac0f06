"""Transfers between pools on one GPU over an emulated wire: the tables of docs/performance.md.

`python -m benchmarks.gpu_transfer [--seconds S] [--json FILE] [--repeat N] [--wire-gb-s X] [--gpus N] [--only TEXT]
[--quick]`

One prefill worker and up to eight decode workers are one process, since the kernels of several would take turns on the
GPU; with `--gpus` a process a GPU, so that what the prefill worker keeps of its rate is its own loss alone. Each has an
agent in a process of its own, without CUDA. Every byte of every transfer is compared. Cases are run in the order of
their weight; those that would begin after `--seconds` are left out and named. `--quick` tries the command on a machine
without a GPU: few rows in host memory, a slow wire, no products.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.needs_gpus import QUICK, check_gpus
from kvxfer.cli.bench_transfer import CaseRunner, TransferResult
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.errors import KvxferError

_MIB = 1 << 20
_CASE = TransferCase(
    transport="loopback",
    mode="packed",
    num_tokens=32_768,
    num_layers=61,
    row_bytes=1152,
    page_tokens=64,
    pages="shuffled",
    num_ranks=8,
    interleave=1,
    chunk_tokens=32_768,
    num_repeats=5,
    num_slots=8,
    slot_bytes=8 * _MIB,
    wire_gb_s=50.0,
    descriptor_us=1.4,
    device="cuda",
    placement="worker",
    deadline_s=10.0,
)
_LONG, _SHORT, _CHUNK = 32_768, 4096, 4096
_SERIAL_CHUNK = 8192
"""In mode serial slots hold the whole chunk of a rank."""
_INTERVAL_S = 0.030
"""Between submits of chunks of 4096 tokens: longer than one takes, far shorter than a model needs to compute it."""


@dataclass(frozen=True, slots=True)
class Named:
    """A case and what it is called."""

    name: str
    case: TransferCase


def all_cases(base: TransferCase) -> list[Named]:
    """Every case, those that share agents beside each other, the weightiest first; 64 MiB of slots a side."""
    return list(_cases(base))


def _cases(base: TransferCase) -> Iterator[Named]:
    for num_ranks in (8, 4):
        ranked = replace(base, num_ranks=num_ranks)
        yield from _both_lengths(f"dcp {num_ranks}", ranked)
        if num_ranks == 8:
            yield Named("dcp 8, chunks", replace(ranked, chunk_tokens=_CHUNK, interval_s=_INTERVAL_S))
            yield Named("dcp 8, busy long", replace(ranked, busy="long"))
            yield Named("dcp 8, busy short", replace(ranked, busy="short"))
            yield Named("dcp 8, verify full", replace(ranked, verify="full"))
    for num_ranks in (8, 4):
        pull = replace(base, num_ranks=num_ranks, mode="p2p", wire_gb_s=None, descriptor_us=0.0)
        yield Named(f"dcp {num_ranks}, p2p", pull)
    on_gpu = replace(base, slot_kind="device")
    yield from _both_lengths("dcp 8, device slots", on_gpu)
    yield Named("dcp 8, device slots, busy long", replace(on_gpu, busy="long"))
    yield Named("dcp 8, device slots, busy short", replace(on_gpu, busy="short"))
    # Two agents beside the prefill agent and the workers: each process that uses the GPU takes turns with the others.
    agent = replace(base, placement="agent", num_slots=24, num_ranks=2)
    for slot_kind in ("pinned_host", "device"):
        kind = "" if slot_kind == "pinned_host" else ", device slots"
        yield Named(f"placement agent{kind}, idle", replace(agent, slot_kind=slot_kind))
        yield Named(f"placement agent{kind}, busy long", replace(agent, slot_kind=slot_kind, busy="long"))
    for num_slots in (4, 8):
        large = replace(base, num_slots=num_slots, slot_bytes=16 * _MIB)
        yield from _both_lengths(f"dcp 8, {num_slots} x 16 MiB", large)
    for num_ranks in (8, 4):
        ranked = replace(base, num_ranks=num_ranks)
        yield from _both_lengths(f"dcp {num_ranks}, 512 MiB", replace(ranked, num_slots=64))
        # Slots as the longer of the two needs them, so that one set of agents serves both.
        serial = replace(ranked, mode="serial", num_tokens=_LONG, chunk_tokens=_SERIAL_CHUNK)
        yield from _both_lengths(f"dcp {num_ranks}, serial", replace(serial, slot_bytes=serial.slots()[0].slot_bytes))


def _both_lengths(name: str, case: TransferCase) -> Iterator[Named]:
    for num_tokens in (_LONG, _SHORT):
        yield Named(f"{name}, {num_tokens} tokens", replace(case, num_tokens=num_tokens))


def run(cases: list[Named], seconds: float, json_path: Path | None) -> tuple[dict[str, TransferResult], bool]:
    """Run the cases and print each as it ends; what is there by then is in the file, whatever comes after.

    Returns the results by name, and whether none failed.
    """
    began_s = time.monotonic()
    results: dict[str, TransferResult] = {}
    facts: list[dict[str, Any]] = []
    left_out: list[str] = []
    all_ran = True
    _say("| case | ms | share | GB/s | tail ms | us a segment | decode us | agent us | kept | MiB | s |")
    _say("|---|---|---|---|---|---|---|---|---|---|---|")
    try:
        num_gpus = cases[0].case.num_gpus if cases[0].case.device == "cuda" else None
        with CaseRunner(max(each.case.num_ranks for each in cases), num_gpus) as runner:
            for named in cases:
                if time.monotonic() - began_s > seconds:
                    left_out.append(named.name)
                    continue
                results[named.name] = result = _run_one(runner, named)
                facts.append({"name": named.name, "at_s": time.monotonic() - began_s} | result.as_json())
                _say(_row(named.name, facts[-1]))
                if json_path is not None:
                    json_path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    except KvxferError as error:
        all_ran = False
        _say(f"ended early: {error}")
    if left_out:
        _say(f"left out after {seconds:.0f} s: {'; '.join(left_out)}")
    _say(f"{time.monotonic() - began_s:.0f} s in all")
    return results, all_ran


def _run_one(runner: CaseRunner, named: Named) -> TransferResult:
    try:
        return runner.run(named.case)
    except KvxferError:
        _say(f"{named.name} failed; the last words of all processes:{runner.log_tails()}")
        raise


def _row(name: str, facts: dict[str, Any]) -> str:
    kept = "" if facts["worker_rate_kept"] is None else f"{facts['worker_rate_kept']:.3f}"
    wrong = "" if facts["verified"] else f" WRONG: {facts['problems'][0]}"
    share = "" if facts["share_of_wire"] is None else f"{facts['share_of_wire']:.3f}"
    return (
        f"| {name}{wrong} | {facts['transfer_ms']:.2f} | {share} | {facts['goodput_gb_s']:.1f} "
        f"| {facts['exposed_tail_ms']:.2f} | {facts['worker_us_per_segment'] or 0.0:.0f} "
        f"| {facts['decode_worker_us_per_segment'] or 0.0:.0f} | {facts['agent_us_per_segment'] or 0.0:.0f} | {kept} "
        f"| {facts['peak_device_bytes'] / _MIB:.1f} | {facts['at_s']:.0f} |"
    )


def print_goals(results: dict[str, TransferResult]) -> None:
    """What the figures say of the goals."""
    _say("\n| goal | got | wanted |\n|---|---|---|")
    for num_ranks in (8, 4):
        for num_tokens, wanted in ((_LONG, 0.92), (_SHORT, 0.85)):
            small, large, serial = (
                results.get(f"dcp {num_ranks}{kind}, {num_tokens} tokens") for kind in ("", ", 512 MiB", ", serial")
            )
            what = f"dcp {num_ranks}, {num_tokens} tokens"
            if small is not None:
                _goal(f"share of the wire, {what}", small.share_of_wire, f"at least {wanted}")
            if small is not None and large is not None:
                _goal(f"64 MiB of slots / 512 MiB, {what}", large.elapsed_s / small.elapsed_s, "at least 0.95")
            if serial is not None:
                _goal(f"serial: share of the wire, {what}", serial.share_of_wire, "")
        packed, pulled = results.get(f"dcp {num_ranks}, {_LONG} tokens"), results.get(f"dcp {num_ranks}, p2p")
        if pulled is not None:
            facts = pulled.as_json()
            _goal(f"GB/s of pulls, dcp {num_ranks}", facts["goodput_gb_s"], "")
            _goal(f"pulls / a copy on the device, dcp {num_ranks}", facts["efficiency"], "as near 1 as can be")
            if packed is not None:
                _goal(f"pulls / packed, dcp {num_ranks}", packed.elapsed_s / pulled.elapsed_s, "at least 3")
    for busy, wanted in (("long", 0.95), ("short", 0.93)):
        result = results.get(f"dcp 8, busy {busy}")
        if result is not None:
            _goal(f"share of the wire, busy {busy}", result.share_of_wire, "at least 0.92")
            _goal(f"worker keeps, busy {busy}", result.rate_kept, f"at least {wanted}")
            _goal(f"worker's us a segment, busy {busy}", result.as_json()["worker_us_per_segment"], "at most 40")
    plain, verified = results.get(f"dcp 8, {_LONG} tokens"), results.get("dcp 8, verify full")
    if plain is not None and verified is not None:
        _goal("verify full / off, goodput", plain.elapsed_s / verified.elapsed_s, "at least 0.9")
    for what in (f"{_LONG} tokens", f"{_SHORT} tokens", "busy long", "busy short"):
        result = results.get(f"dcp 8, device slots, {what}")
        if result is not None:
            _goal(f"share of the wire, device slots, {what}", result.share_of_wire, "at least 0.95")
    for kind in ("", ", device slots"):
        result = results.get(f"placement agent{kind}, busy long")
        if result is not None:
            _goal(f"GB/s, placement agent{kind}, busy long", result.as_json()["goodput_gb_s"], "at least 47")
            _goal(f"worker keeps, placement agent{kind}, busy long", result.rate_kept, "at least 0.92")
    chunks, alone = results.get("dcp 8, chunks"), results.get(f"dcp 8, {_SHORT} tokens")
    if chunks is not None and alone is not None:
        _goal("tail of chunks of 4096 / one such chunk alone", chunks.tail_s / alone.tail_s, "at most 1.2")
    first = results.get(f"dcp 8, {_LONG} tokens")
    if first is not None:  # later on kernels of the products have been loaded as well
        # Of the process with the prefill worker: alone, or with eight decode workers.
        mib_per_worker = first.as_json()["peak_device_bytes"] / _MIB / (1 if first.case.num_gpus > 1 else 9)
        _goal("MiB of the GPU besides pools, a worker", mib_per_worker, "at most 16")


def _goal(what: str, got: float | None, wanted: str) -> None:
    _say(f"| {what} | {'-' if got is None else f'{got:.3f}'} | {wanted} |")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Run the command; 1 where a byte differs or a case failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=85.0, help="begin no case after so long")
    parser.add_argument("--json", type=Path, help="write the facts of all cases into this file")
    parser.add_argument("--repeat", type=int, default=_CASE.num_repeats, help="transfers of each case")
    parser.add_argument("--wire-gb-s", type=float, default=_CASE.wire_gb_s, help="rate of the wire")
    parser.add_argument("--gpus", type=int, default=1, help="the prefill worker has the first, decode ranks the others")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--quick", action="store_true", help="few rows in host memory")
    options = parser.parse_args()
    base = replace(_CASE, num_repeats=options.repeat, wire_gb_s=options.wire_gb_s, num_gpus=options.gpus)
    cases = [each for each in all_cases(base) if options.only in each.name]
    if options.quick:
        cases = [_quick(each) for each in cases if each.case.busy == "none"]
    else:
        check_gpus(parser, options.gpus, QUICK)
    if not cases:
        parser.error(f"--only: got {options.only}, expected what is in the name of a case, such as p2p")
    results, all_ran = run(cases, options.seconds, options.json)
    if not options.quick:  # they are goals of a GPU
        print_goals(results)
    return 0 if all_ran and not any(result.problems for result in results.values()) else 1


def _quick(named: Named) -> Named:
    case = named.case
    small = replace(
        case,
        num_tokens=case.num_tokens // 64,
        chunk_tokens=case.chunk_tokens // 64,
        num_ranks=max(1, case.num_ranks // 4),
        num_layers=4,
        num_slots=min(case.num_slots, 16),
        slot_bytes=64 << 10,
        wire_gb_s=0.2,
        device="cpu",
        slot_kind="pinned_host",
        num_gpus=1,
    )
    return Named(named.name, small)


if __name__ == "__main__":
    sys.exit(main())
