"""The same scenarios over NCCL, two GPUs or four; and what only GPUs show: CUDA graphs and peak memory."""

from pathlib import Path

import pytest
import torch

from tests.decode import dcp_gpu_scenarios, dcp_scenarios
from tests.decode.dcp_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks"),
]


@pytest.mark.parametrize(
    "scenario",
    [
        dcp_scenarios.merges_to_the_whole,
        dcp_scenarios.verifies_speculated_tokens,
        dcp_scenarios.addresses_stay,
        dcp_scenarios.a_wrong_base_shows,
        dcp_scenarios.counts_owned_tokens,
        dcp_gpu_scenarios.replays_a_graph,
        dcp_gpu_scenarios.stays_within_memory,
    ],
)
def test_over_nccl(tmp_path: Path, scenario: object) -> None:
    assert callable(scenario)
    run_ranks(scenario, 2, tmp_path, device="cuda")


def test_fp8_over_nccl(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.merges_fp8, 2, tmp_path, torch.float8_e4m3fn, device="cuda")
    run_ranks(dcp_scenarios.gathers_queries, 2, tmp_path, torch.float8_e4m3fn, device="cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="NCCL needs a GPU for each of four ranks")
@pytest.mark.parametrize("scenario", [dcp_scenarios.merges_to_the_whole, dcp_gpu_scenarios.replays_a_graph])
def test_four_ranks_over_nccl(tmp_path: Path, scenario: object) -> None:
    assert callable(scenario)
    run_ranks(scenario, 4, tmp_path, device="cuda")
