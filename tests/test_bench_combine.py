"""The benchmark of the merge over ranks, on small shapes over gloo: that it runs whole and reports every part."""

import json
import multiprocessing

import pytest
import torch
import typer

from benchmarks.combine import SHAPES, Device, main

# A fork server that has imported torch starts a rank in milliseconds.
multiprocessing.set_forkserver_preload(["torch.distributed", "benchmarks.combine"])


def test_every_part_is_timed(capfd: pytest.CaptureFixture[str]) -> None:
    main(2, Device.CPU, as_json=True)
    report = json.loads(capfd.readouterr().out)
    assert (report["world"], report["library"]) == (2, "gloo")
    shapes = SHAPES[Device.CPU]
    parts = {"a2a": ("pack", "exchange", "combine", "whole"), "ag_rs": ("gather", "scale", "scatter", "whole")}
    expected = [(way, part, batch) for way, names in parts.items() for batch in shapes.batches for part in names]
    expected += [
        (way, part, shapes.wide_batch) for part in ("pack", "exchange", "whole") for way in ("packed", "apart")
    ]
    assert [(row["way"], row["part"], row["batch"]) for row in report["rows"]] == expected
    assert all(row["us"] > 0 for row in report["rows"])
    senders = {row["part"] for row in report["rows"] if row["sent_gbs"] is not None}
    assert senders == {"exchange", "gather", "scatter", "whole"}


def test_ranks_without_a_gpu_each_are_refused() -> None:
    num_gpus = torch.cuda.device_count()
    with pytest.raises(typer.BadParameter, match=rf"^--world: got {num_gpus + 1} on a machine with {num_gpus} GPUs"):
        main(num_gpus + 1)
