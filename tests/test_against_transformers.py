"""An outside judge: decoding from split latent KV must give the tokens of transformers' own `generate`."""

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from kvxfer.layout import Shard
from tests.deepseek_judge import (
    build_model,
    decode_tokens,
    generated_tokens,
    prefill_latents,
    scattered_rank,
)

NUM_NEW_TOKENS = 16
PROMPT = torch.randint(1, 128, (37,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    return build_model(seed=3)


@pytest.fixture(scope="module")
def expected(model: DeepseekV3ForCausalLM) -> list[int]:
    tokens = generated_tokens(model, PROMPT, NUM_NEW_TOKENS)
    assert len(set(tokens)) >= 6, f"a judge that repeats itself proves little: {tokens}"
    return tokens


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_attention_split_over_ranks_gives_the_tokens_of_generate(
    model: DeepseekV3ForCausalLM, expected: list[int], num_ranks: int, interleave: int
) -> None:
    rows, first_token = prefill_latents(model, PROMPT)
    ranks = [
        scattered_rank(
            Shard(rank=rank, size=num_ranks, interleave=interleave), rows, page_tokens=4, spare_tokens=16, seed=rank
        )
        for rank in range(num_ranks)
    ]
    assert decode_tokens(model, ranks, first_token, NUM_NEW_TOKENS) == expected


def test_a_prompt_so_short_that_a_rank_starts_empty(model: DeepseekV3ForCausalLM) -> None:
    prompt = PROMPT[:2]
    rows, first_token = prefill_latents(model, prompt)
    shards = [Shard(rank=rank, size=4, interleave=1) for rank in range(4)]
    ranks = [scattered_rank(shard, rows, page_tokens=4, spare_tokens=16, seed=9) for shard in shards]
    assert decode_tokens(model, ranks, first_token, NUM_NEW_TOKENS) == generated_tokens(model, prompt, NUM_NEW_TOKENS)


def test_the_judge_notices_one_lost_row(model: DeepseekV3ForCausalLM, expected: list[int]) -> None:
    """A row of zeros where a token's latent belongs, on one rank in every layer, changes the tokens."""
    rows, first_token = prefill_latents(model, PROMPT)
    for layer_rows in rows:
        layer_rows[30] = 0.0
    shards = [Shard(rank=rank, size=2, interleave=1) for rank in range(2)]
    ranks = [
        scattered_rank(shard, rows, page_tokens=4, spare_tokens=16, seed=rank) for rank, shard in enumerate(shards)
    ]
    assert decode_tokens(model, ranks, first_token, NUM_NEW_TOKENS) != expected
