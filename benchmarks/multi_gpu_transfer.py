"""Transfers between agents whose workers have different GPUs of one host, beside a copy of the same bytes.

`python -m benchmarks.multi_gpu_transfer --gpus N [--seconds S] [--json FILE] [--repeat N] [--modes M,M] [--quick]`

The prefill worker has GPU 0, decode ranks in turn the others. Every byte of every transfer is compared. A case that
fails is named and the next one run; those that would begin after `--seconds` are left out. `--quick` tries the command
without a GPU: few rows in host memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_transfer import Named
from benchmarks.needs_gpus import QUICK, check_gpus
from kvxfer.cli.bench_transfer import CaseRunner
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.errors import KvxferError

_CASE = TransferCase(
    transport="loopback",
    mode="p2p",
    num_tokens=131_072,
    num_layers=61,
    row_bytes=1152,
    page_tokens=64,
    pages="shuffled",
    num_ranks=1,
    interleave=1,
    chunk_tokens=32_768,
    num_repeats=5,
    num_slots=8,
    slot_bytes=8 << 20,
    device="cuda",
    placement="worker",
    deadline_s=20.0,
)
_LONG, _SHORT = 131_072, 32_768


def all_cases(num_gpus: int, num_repeats: int) -> list[Named]:
    """Pulls of two lengths, then rows by way of slots, on the GPUs and in host memory."""
    return list(_cases(replace(_CASE, num_gpus=num_gpus, num_repeats=num_repeats), num_gpus))


def _cases(base: TransferCase, num_gpus: int) -> Iterator[Named]:
    sizes = [num_ranks for num_ranks in (1, 2, 4, 8) if num_ranks <= max(4, num_gpus)]
    for num_tokens in (_LONG, _SHORT):
        for num_ranks in sizes:
            # In four submits: while rows of one are pulled, the next one is planned.
            pull = replace(base, num_ranks=num_ranks, num_tokens=num_tokens, chunk_tokens=num_tokens // 4)
            yield Named(f"p2p, dcp {num_ranks}, {num_tokens} tokens", pull)
    slots = replace(base, mode="packed", num_tokens=_SHORT, chunk_tokens=8192)
    for transport in ("nixl", "loopback"):
        for num_ranks in sizes[1:]:
            on_gpu = replace(slots, transport=transport, num_ranks=num_ranks, slot_kind="device")
            for mode in ("packed", "serial"):
                yield Named(f"{mode}, dcp {num_ranks}, {transport}, device slots", replace(on_gpu, mode=mode))
    yield Named("packed, dcp 4, nixl, pinned slots", replace(slots, transport="nixl", num_ranks=4))


def run(cases: list[Named], num_gpus: int | None, seconds: float, json_path: Path | None) -> tuple[list[Any], bool]:
    """Run the cases and print each as it ends; what is there by then is in the file, whatever comes after.

    Returns the facts of those that ended, and whether none failed.
    """
    began_s = time.monotonic()
    waiting = deque(cases)
    facts: list[dict[str, Any]] = []
    left_out: list[str] = []
    num_failed = 0
    max_ranks = max(each.case.num_ranks for each in cases)
    _say("| case | ms | GB/s | yardstick GB/s | share | tail ms | descriptors | MiB | s |")
    _say("|---|---|---|---|---|---|---|---|---|")
    while waiting:
        named = waiting[0]
        try:
            with CaseRunner(max_ranks, num_gpus) as runner:
                while waiting:
                    named = waiting.popleft()
                    if time.monotonic() - began_s > seconds:
                        left_out.append(named.name)
                        continue
                    facts.append(_run_one(runner, named) | {"at_s": time.monotonic() - began_s})
                    _say(_row(facts[-1]))
                    if json_path is not None:
                        json_path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        except KvxferError as error:  # the processes are gone; others run what is left
            num_failed += 1
            _say(f"{named.name} failed: {error}")
    if left_out:
        _say(f"left out after {seconds:.0f} s: {'; '.join(left_out)}")
    return facts, not num_failed


def _run_one(runner: CaseRunner, named: Named) -> dict[str, Any]:
    try:
        return {"name": named.name} | runner.run(named.case).as_json()
    except KvxferError:
        _say(f"{named.name}: the last words of all processes:{runner.log_tails()}")
        raise


def _row(facts: dict[str, Any]) -> str:
    wrong = "" if facts["verified"] else f" WRONG: {facts['problems'][0]}"
    return (
        f"| {facts['name']}{wrong} | {facts['transfer_ms']:.2f} | {facts['goodput_gb_s']:.1f} "
        f"| {facts['contiguous_gb_s'] or 0.0:.1f} | {facts['efficiency'] or 0.0:.3f} | {facts['exposed_tail_ms']:.2f} "
        f"| {facts['descriptors_sent']} | {facts['peak_device_bytes'] / 2**20:.1f} | {facts['at_s']:.0f} |"
    )


def print_goals(facts: list[dict[str, Any]]) -> None:
    """What the figures say of the goal for pulls, where there are any."""
    if all(each["mode"] != "p2p" for each in facts):
        return
    _say("\n| goal | got | wanted |\n|---|---|---|")
    for each in facts:
        if each["mode"] == "p2p":
            _say(f"| pull / copy from GPU to GPU, {each['name']} | {each['efficiency']:.3f} | at least 0.85 |")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Run the command; 1 where a byte differs or a case failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2, help="GPUs that the workers have in turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no case after so long")
    parser.add_argument("--json", type=Path, help="write the facts of all cases into this file")
    parser.add_argument("--repeat", type=int, default=_CASE.num_repeats, help="transfers of each case")
    parser.add_argument("--modes", default="p2p,packed,serial", help="cases of these modes")
    parser.add_argument("--quick", action="store_true", help="few rows in host memory")
    options = parser.parse_args()
    modes = options.modes.split(",")
    cases = [each for each in all_cases(options.gpus, options.repeat) if each.case.mode in modes]
    if not cases:
        parser.error(f"--modes: got {options.modes}, expected some of p2p, packed, serial")
    if not options.quick:
        check_gpus(parser, options.gpus, QUICK)
    else:
        cases = [Named(each.name, _quick(each.case)) for each in cases]
    facts, all_ran = run(cases, None if options.quick else options.gpus, options.seconds, options.json)
    if not options.quick:  # they are goals of GPUs
        print_goals(facts)
    return 0 if all_ran and all(each["verified"] for each in facts) else 1


def _quick(case: TransferCase) -> TransferCase:
    return replace(
        case,
        num_tokens=case.num_tokens // 512,
        chunk_tokens=case.chunk_tokens // 512,
        num_layers=4,
        slot_bytes=64 << 10,
        device="cpu",
        num_gpus=1,
        slot_kind="pinned_host",
        placement="worker",
    )


if __name__ == "__main__":
    sys.exit(main())
