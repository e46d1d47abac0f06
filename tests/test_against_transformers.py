"""An outside judge: decoding from split latent KV must give the tokens of transformers' own `generate`."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from kvxfer.kernels import LseBase
from kvxfer.layout import Shard
from tests.deepseek_agents import MODEL_SEED, decode_in_processes, decode_through_agents
from tests.deepseek_judge import (
    attend_together,
    build_model,
    decode_tokens,
    generated_tokens,
    prefill_at_once,
    scattered_rank,
    softmax_scale,
)

NUM_NEW_TOKENS = 16
PROMPT = torch.randint(1, 128, (37,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    return build_model(MODEL_SEED)


@pytest.fixture(scope="module")
def expected(model: DeepseekV3ForCausalLM) -> list[int]:
    tokens = generated_tokens(model, PROMPT, NUM_NEW_TOKENS)
    assert len(set(tokens)) >= 6, f"a judge that repeats itself proves little: {tokens}"
    return tokens


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_that_agents_fed_give_the_tokens_of_generate(
    tmp_path: Path, model: DeepseekV3ForCausalLM, expected: list[int], num_ranks: int, interleave: int
) -> None:
    tokens = decode_through_agents(tmp_path, model, PROMPT, NUM_NEW_TOKENS, num_ranks=num_ranks, interleave=interleave)
    assert tokens == expected


@pytest.mark.nixl
def test_over_nixl(tmp_path: Path, model: DeepseekV3ForCausalLM, expected: list[int]) -> None:
    tokens = decode_through_agents(tmp_path, model, PROMPT, NUM_NEW_TOKENS, num_ranks=3, transport="nixl")
    assert tokens == expected


@pytest.mark.parametrize(("num_ranks", "interleave", "backend"), [(3, 1, "a2a"), (2, 8, "ag_rs")])
def test_ranks_in_processes_merge_with_a_dcp_group(
    tmp_path: Path,
    model: DeepseekV3ForCausalLM,
    expected: list[int],
    num_ranks: int,
    interleave: int,
    backend: Literal["a2a", "ag_rs"],
) -> None:
    decode_in_processes(tmp_path, model, PROMPT, expected, num_ranks=num_ranks, interleave=interleave, backend=backend)


def test_a_prompt_so_short_that_ranks_start_empty(tmp_path: Path, model: DeepseekV3ForCausalLM) -> None:
    tokens = decode_through_agents(tmp_path, model, PROMPT[:2], NUM_NEW_TOKENS, num_ranks=4)
    assert tokens == generated_tokens(model, PROMPT[:2], NUM_NEW_TOKENS)


def decode_without_agents(
    model: DeepseekV3ForCausalLM,
    num_ranks: int,
    interleave: int,
    *,
    lost_token: int | None = None,
    lse_base: LseBase = "e",
) -> list[int]:
    """Rows put into the ranks' pages by plain indexing; those of `lost_token` are zeros."""
    rows, first_token = prefill_at_once(model, PROMPT)
    if lost_token is not None:
        for layer_rows in rows:
            layer_rows[lost_token] = 0.0
    shards = [Shard(rank=rank, size=num_ranks, interleave=interleave) for rank in range(num_ranks)]
    ranks = [scattered_rank(shard, rows, page_tokens=4, spare_tokens=16, seed=shard.rank) for shard in shards]
    attend = attend_together(ranks, softmax_scale(model), lse_base)
    return decode_tokens(model, first_token, len(PROMPT), NUM_NEW_TOKENS, attend)


@pytest.mark.parametrize(("num_ranks", "interleave"), [(1, 1), (3, 8)])
def test_without_agents_in_between(
    model: DeepseekV3ForCausalLM, expected: list[int], num_ranks: int, interleave: int
) -> None:
    """Tells a fault of the attention from one of the transfer."""
    assert decode_without_agents(model, num_ranks, interleave) == expected


def test_the_judge_notices_one_lost_row(model: DeepseekV3ForCausalLM, expected: list[int]) -> None:
    """A row of zeros where a token's latent belongs, on one rank in every layer, changes the tokens."""
    assert decode_without_agents(model, 2, 1, lost_token=30) != expected


def test_the_judge_notices_a_wrong_base(model: DeepseekV3ForCausalLM, expected: list[int]) -> None:
    assert decode_without_agents(model, 3, 1, lse_base="2") != expected
