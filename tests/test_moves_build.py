"""The kernels of `move_rows` build for GPUs on a machine without one: once for all rows, with accesses of 16 bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = """
from kvxfer.kernels.moves import compile_move_rows
built = compile_move_rows(90)
for each in built.stage, built.check, built.move:
    assert each.cubin[:4] == b"\\x7fELF"
    print(each.name, each.num_params, each.num_threads, each.shared_bytes)
"""
# Words a thread has on their way at once: of an order and of rows.
ACCESSES_OF_16_BYTES = {"_stage_order_kernel": 8, "check_segment_kernel": 8, "_move_rows_kernel": 8}


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
    listings = {path.stem: path.read_text() for path in tmp_path.rglob("*.ptx")}
    assert listings.keys() == ACCESSES_OF_16_BYTES.keys()
    for built in done.stdout.splitlines():
        name, num_params, num_threads, shared_bytes = built.split()
        ptx = listings[name]
        entry = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
        assert entry is not None
        assert entry[1] == name
        assert re.findall(r"\.param \.(\w+)", entry[2]) == ["u64"] * int(num_params)
        assert re.search(rf"\.reqntid {num_threads}\b", ptx)
        assert int(shared_bytes) <= 1024
        assert re.search(r"\.maxnreg 128\b", ptx)
        assert ".local" not in ptx
        for access in "ld", "st":
            assert len(re.findall(rf"{access}\.global\.v2\.b64", ptx)) == ACCESSES_OF_16_BYTES[name]
    # The entry is read once, past all caches, and by the program that stages it alone.
    assert len(re.findall(r"ld\.volatile\.global", listings["_stage_order_kernel"])) == 1
    assert "volatile" not in listings["_move_rows_kernel"]
    # Threads add to sums of their own: a segment is checked without one of them waiting for another, and whoever reads
    # the sums has acquired what all others released.
    assert "bar.sync" not in listings["check_segment_kernel"]
    assert len(re.findall(r"atom\.global\.gpu\.acq_rel\.add", listings["_move_rows_kernel"])) == 1
    for access in re.findall(r"\b(?:red|atom)\.\S+", listings["check_segment_kernel"]):
        assert ".relaxed." in access
