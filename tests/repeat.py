"""Runs tests many times, each time in a process of its own, and says which of them ever failed.

`python -m tests.repeat tests/transports/test_conformance_faults.py tests/faults --times 50`
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all tests: its exit status, what failed, and all that it printed."""

    status: int
    failed: tuple[str, ...]
    output: str


def run_once(arguments: Sequence[str]) -> Run:
    """Run `pytest ARGUMENTS`."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return Run(ended.returncode, tuple(_FAILED.findall(ended.stdout)), ended.stdout)


def main() -> int:
    """Status 0 if every run was good."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=50)
    options, arguments = parser.parse_known_args()
    failures: Counter[str] = Counter()
    num_bad = 0
    for number in range(1, options.times + 1):
        began_s = time.monotonic()
        run = run_once(arguments)
        num_bad += run.status != 0
        failures.update(run.failed)
        verdict = "good" if run.status == 0 else f"status {run.status}: {', '.join(run.failed) or 'no test failed'}"
        _say(f"run {number} of {options.times}, {time.monotonic() - began_s:.0f} s: {verdict}")
        if run.status != 0:
            _say(run.output)
    for name, count in failures.most_common():
        _say(f"{name}: failed in {count} of {options.times} runs")
    _say(f"{options.times - num_bad} of {options.times} runs were good")
    return 1 if num_bad else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
