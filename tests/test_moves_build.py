"""The kernel of `move_rows` builds for GPUs on a machine without one: once for all rows, with accesses of 16 bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kvxfer.kernels.moves import NUM_PARAMS

ROOT = Path(__file__).parent.parent
BUILD = """
from kvxfer.kernels.moves import compile_move_rows
built = compile_move_rows(90)
assert built.cubin[:4] == b"\\x7fELF"
print(built.name, built.num_threads, built.shared_bytes)
"""


def test_builds_with_the_parameters_that_launches_pass(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, num_threads, shared_bytes = done.stdout.split()
    (listing,) = tmp_path.rglob("*.ptx")
    ptx = listing.read_text()
    entry = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    assert entry[1] == name
    assert re.findall(r"\.param \.(\w+)", entry[2]) == ["u64"] * NUM_PARAMS
    assert re.search(rf"\.reqntid {num_threads}\b", ptx)
    assert int(shared_bytes) <= 1024
    # Four words a thread and launch of 16 bytes each way, and the order read past all caches.
    assert len(re.findall(r"ld\.global\.v2\.b64", ptx)) == len(re.findall(r"st\.global\.v2\.b64", ptx)) == 4
    assert len(re.findall(r"ld\.volatile\.global\.b64", ptx)) == 2
