"""Fuzzing on demand.

`python -m tests.fuzz TARGET --seconds N` lets atheris search for input that breaks a target's promise; it needs the
extra `fuzz`. `python -m tests.fuzz live --frames N` attacks a live agent, see `tests.fuzz.live`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path


def _search(name: str, seconds: int) -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: install kvxfer with the extra fuzz")
    # Instrumented as they are imported, so they must not have been imported before.
    with atheris.instrument_imports(include=["kvxfer", "tests.fuzz"]):
        from tests.fuzz.targets import SEEDS, TARGETS
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        for number, seed in enumerate(SEEDS[name]):
            (Path(directory) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=4096", directory], TARGETS[name])
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", help="a target of tests.fuzz.targets, or live")
    parser.add_argument("--seconds", type=int, default=60, help="how long to search")
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames of a live attack")
    parser.add_argument("--seed", type=int, default=1, help="of the frames of a live attack")
    arguments = parser.parse_args()
    if arguments.target == "live":
        from tests.fuzz.live import attack

        report = attack(arguments.frames, arguments.seed)
        sys.stdout.write(report.as_text())
        sys.exit(0 if report.is_right else 1)
    _search(arguments.target, arguments.seconds)


if __name__ == "__main__":
    main()
