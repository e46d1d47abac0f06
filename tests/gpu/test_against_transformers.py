"""The outside judge with a GPU for each decode rank: pools and attention lie there, the merge goes over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from kvxfer.ops.config import TransferMode
from tests.deepseek_agents import MODEL_SEED, decode_in_processes
from tests.deepseek_judge import build_model, generated_tokens

NUM_NEW_TOKENS = 16
PROMPT = torch.randint(1, 128, (37,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.gpu(limit_s=110.0)
@pytest.mark.parametrize(
    ("num_ranks", "interleave", "backend", "mode"),
    [(2, 1, "a2a", "packed"), (2, 8, "ag_rs", "p2p"), (4, 1, "a2a", "p2p"), (4, 8, "ag_rs", "packed")],
)
def test_ranks_on_gpus_give_the_tokens_of_generate(
    tmp_path: Path, num_ranks: int, interleave: int, backend: Literal["a2a", "ag_rs"], mode: TransferMode
) -> None:
    """Rows come from host memory by way of slots, or are pulled out of a pool on GPU 0."""
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {num_ranks} GPUs, one for each rank")
    model = build_model(MODEL_SEED)
    expected = generated_tokens(model, PROMPT, NUM_NEW_TOKENS)
    assert len(set(expected)) >= 6, f"a judge that repeats itself proves little: {expected}"
    decode_in_processes(
        tmp_path,
        model,
        PROMPT,
        expected,
        num_ranks=num_ranks,
        interleave=interleave,
        backend=backend,
        mode=mode,
        src_device="cuda" if mode == "p2p" else "cpu",
        dst_device="cuda",
    )
