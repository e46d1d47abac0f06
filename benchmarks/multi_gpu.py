"""All that docs/performance.md says of several GPUs of one host, in one command.

`python -m benchmarks.multi_gpu [--json FILE] [--only TEXT] [--quick]`

Pulls from GPU to GPU, transfers by way of slots, tests that need several GPUs, and the merge of partial attention over
NCCL. Each part is a process of its own under a time limit; one that fails or hangs is named, and the next one run.
NVLink multicast stays off. `--quick` tries the command without GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.needs_gpus import QUICK, check_gpus

_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_GRACE_S = 15.0
"""For a part that was told to end, which gives back what it has made."""
_PYTEST = ("pytest", "-q", "-rs", "-p", "no:cacheprovider", "--durations=5")
_FACTS = "FACTS"


@dataclass(frozen=True, slots=True)
class Part:
    """`python -m ARGUMENTS`, for at most `limit_s`; `FACTS` among them stands for the file that takes its JSON, which
    some print instead."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    prints_facts: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part. `exit_status` is None where its time was over; `facts` is its JSON, None without any."""

    name: str
    exit_status: int | None
    elapsed_s: float
    output: str = field(repr=False)
    facts: Any = None

    @property
    def verdict(self) -> str:
        if self.exit_status is None:
            return "its time was over"
        return "ran" if self.exit_status == 0 else f"failed, exit status {self.exit_status}"


def all_parts(num_gpus: int, *, quick: bool) -> list[Part]:
    """What is run on so many GPUs, the weightiest first."""
    small = ("--quick", "--repeat", "1") if quick else ()
    transfer = ("benchmarks.multi_gpu_transfer", "--gpus", str(num_gpus), "--json", _FACTS, *small)
    parts = [
        Part("pulls", (*transfer, "--modes", "p2p", "--seconds", "40"), 60.0),
        Part("slots", (*transfer, "--modes", "packed,serial", "--seconds", "40"), 60.0),
        Part("judge", (*_PYTEST, "tests/gpu/test_against_transformers.py"), 110.0),
        Part("peers", (*_PYTEST, "tests/gpu/test_pools.py"), 60.0),
    ]
    if not quick:
        stream = ("benchmarks.peer_pulls", "--json", _FACTS)
        rows = ("benchmarks.gpu_nixl", "--target-gpu", "1", "--repeat", "3", "--json", _FACTS)
        parts[1:1] = [Part("stream", stream, 40.0), Part("rows", rows, 40.0)]
    device = ("--device", "cpu") if quick else ()
    for world in (2, 4, 8):
        if world <= num_gpus:
            arguments = ("benchmarks.combine", "--world", str(world), "--json", *device)
            parts.append(Part(f"combine {world}", arguments, 60.0, prints_facts=True))
    parts.append(Part("merge", (*_PYTEST, "tests/decode/test_dcp_nccl.py"), 60.0))
    return parts


def run_part(part: Part) -> Outcome:
    """Run a part to its end, or until its time is over: it is told to end then, and ended."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, name) for name in ("facts.json", "output", "errors")]
        arguments = [str(paths[0]) if each == _FACTS else each for each in part.arguments]
        with paths[1].open("wb") as output, paths[2].open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdout=output,
                stderr=errors,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,
            )
            exit_status = _wait(process, part.limit_s)
        elapsed_s = time.monotonic() - began_s
        facts, said, complaints = (
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in paths
        )
    if part.prints_facts and exit_status == 0:
        facts, said = said, ""
    return Outcome(part.name, exit_status, elapsed_s, said + complaints, json.loads(facts) if facts else None)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit status, None where it had to be ended, with what is left of its process group."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def print_combine(outcomes: Sequence[Outcome]) -> None:
    """The whole merge by ranks and batch, and one packed exchange against two."""
    reports = [each.facts for each in outcomes if each.name.startswith("combine") and each.facts]
    if not reports:
        return
    _say("\n| ranks | batch | a2a us | ag_rs us | packed us | apart us |\n|---|---|---|---|---|---|")
    for report in reports:
        whole = {(row["batch"], row["way"]): row["us"] for row in report["rows"] if row["part"] == "whole"}
        for batch in sorted({batch for batch, _ in whole}):
            ways = (whole.get((batch, way)) for way in ("a2a", "ag_rs", "packed", "apart"))
            cells = " | ".join("" if us is None else f"{us:.1f}" for us in ways)
            _say(f"| {report['world']} | {batch} | {cells} |")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Run the command; 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write what became of all parts into this file")
    parser.add_argument("--only", default="", help="parts whose names contain this: pulls, stream, combine 2")
    parser.add_argument("--quick", action="store_true", help="small parts without GPUs")
    options = parser.parse_args()
    if not options.quick:
        check_gpus(parser, 2, QUICK)
    num_gpus = 2 if options.quick else torch.cuda.device_count()
    parts = [part for part in all_parts(num_gpus, quick=options.quick) if options.only in part.name]
    if not parts:
        parser.error(f"--only: got {options.only}, expected what is in the name of a part, such as pulls")
    outcomes: list[Outcome] = []
    for part in parts:
        _say(f"== {part.name}: python -m {' '.join(part.arguments)}")
        outcomes.append(run_part(part))
        _say(outcomes[-1].output[-6000:].rstrip())
        _say(f"== {part.name}: {outcomes[-1].verdict}, {outcomes[-1].elapsed_s:.0f} s")
        if options.json is not None:
            facts = {"num_gpus": num_gpus, "torch": torch.__version__, "parts": [asdict(each) for each in outcomes]}
            options.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print_combine(outcomes)
    return 0 if all(each.exit_status == 0 for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
