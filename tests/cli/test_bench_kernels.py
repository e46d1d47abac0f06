"""`kvxfer bench kernels` off the GPU: what it would print, and that it refuses to time what cannot be timed."""

import pytest
import torch

from kvxfer.cli.bench_kernels import Result, bench_kernels, show
from kvxfer.errors import ConfigError, KvxferError


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels can be timed")
def test_without_a_gpu_it_says_why_not() -> None:
    with pytest.raises(KvxferError, match="no CUDA device"):
        bench_kernels()


def test_a_kernel_that_does_not_exist_is_refused_before_anything_else() -> None:
    with pytest.raises(ConfigError, match=r"^--only: got 'foo', expected one of gather_rows, copy_rows, .*mla_decode$"):
        bench_kernels(only="foo")


def test_the_table_tells_missed_goals_from_met_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    met = Result("pack_a2a", "B 8", 1.61, 1308.0, 0.308, None, "<= 1.8 us", True, {"sglang": 1.93}, 0)
    missed = Result("mla_decode", "B 32", 700.0, 1687.0, 0.397, 150.0, ">= 200 TFLOP/s", False, {}, 0)
    show(4250.0, [met, missed])
    lines = capsys.readouterr().out.splitlines()
    assert any("a GPU" in line and "4250 GB/s" in line for line in lines)
    assert any("pack_a2a" in line and "1.61" in line and "yes" in line and "sglang 1.93" in line for line in lines)
    assert any("mla_decode" in line and "150" in line and "NO" in line for line in lines)
