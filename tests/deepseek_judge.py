"""A tiny random DeepSeek-V3 of Hugging Face transformers, decoded with our absorbed attention over split latent KV.

The model's own `generate` is the judge. Its prefill gives the latent rows; whatever stands between `prefill_chunks`
and `DecodeRank` (nothing, or agents that move the rows) must not change a token. All float32: bf16 flips an argmax.

In order: `build_model`, `generated_tokens`, `prefill_chunks`, `DecodeRank` (one a rank), `decode_tokens`.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from kvxfer.kernels import LseBase, lse_combine, mla_decode
from kvxfer.layout import Shard, TokenRange
from kvxfer.ownership import local_len, owned_tokens

RANK_DIM, ROPE_DIM, NOPE_DIM, V_DIM, LAYERS = 32, 16, 16, 24, 3
ROW_DIM = RANK_DIM + ROPE_DIM
HEADS = 12  # 1 to 4 ranks share them evenly

# (layer, position, absorbed query `[1, HEADS, ROW_DIM]`, the new token's row `[ROW_DIM]`) to `[1, HEADS, RANK_DIM]`.
# It stores the row before it attends: a token sees itself.
Attend = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


def build_model(seed: int) -> DeepseekV3ForCausalLM:
    """A dense and two mixture-of-experts layers, interleaved rope with yarn off; std 0.08 keeps the tokens varied."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=RANK_DIM,
        q_lora_rank=40,
        qk_rope_head_dim=ROPE_DIM,
        qk_nope_head_dim=NOPE_DIM,
        v_head_dim=V_DIM,
        max_position_embeddings=256,
        num_mtp_layers=0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = DeepseekV3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
    return model


@torch.no_grad()
def generated_tokens(model: DeepseekV3ForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model's own greedy `generate` gives after `prompt`."""
    ids = torch.tensor([list(prompt)])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens
    )
    return [int(token) for token in found[0, len(prompt) :]]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `[first, end)` of a prompt: per layer their latent rows, `[end - first, ROW_DIM]` float32 contiguous.

    A row is what the model's own cache holds: the normalised latent (its "keys"), then the roped key (its "values").
    `next_token` is what the model would say after token `end - 1`.
    """

    first: int
    end: int
    rows: list[torch.Tensor]
    next_token: int


# Its name has changed between versions of transformers.
_CACHE = "cache" if "cache" in inspect.signature(DeepseekV3ForCausalLM.forward).parameters else "past_key_values"


@torch.no_grad()
def prefill_chunks(model: DeepseekV3ForCausalLM, prompt: Sequence[int], chunk_tokens: int) -> Iterator[PrefillChunk]:
    """Prefills `chunk_tokens` at a time, each chunk with the model's own attention over those before it."""
    cache = DynamicCache(config=model.config)
    for first in range(0, len(prompt), chunk_tokens):
        end = min(first + chunk_tokens, len(prompt))
        logits = model(torch.tensor([list(prompt[first:end])]), use_cache=True, **{_CACHE: cache}).logits
        rows = [torch.cat((layer.keys[0, 0], layer.values[0, 0]), dim=-1)[first:end] for layer in cache.layers]
        yield PrefillChunk(first, end, rows, int(logits[0, -1].argmax()))


def prefill_at_once(model: DeepseekV3ForCausalLM, prompt: Sequence[int]) -> tuple[list[torch.Tensor], int]:
    """Per layer the rows of the whole prompt, and the first new token."""
    (chunk,) = prefill_chunks(model, prompt, len(prompt))
    return chunk.rows, chunk.next_token


@torch.no_grad()
def decode_step(model: DeepseekV3ForCausalLM, token: int, position: int, attend: Attend) -> int:
    """One token through all layers with absorbed attention; returns the next token (greedy)."""
    hidden = model.model.embed_tokens(torch.tensor([[token]]))
    rope = model.model.rotary_emb(hidden, torch.tensor([[position]]))
    for layer_idx, layer in enumerate(model.model.layers):
        normed = layer.input_layernorm(hidden)
        query, row = _query_and_row(layer.self_attn, normed, rope)
        latent = attend(layer_idx, position, query, row)
        value_up = _kv_up_projection(layer.self_attn)[:, NOPE_DIM:]
        heads_out = torch.einsum("bhr,hvr->bhv", latent, value_up).reshape(1, 1, -1)
        hidden = hidden + layer.self_attn.o_proj(heads_out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return int(model.lm_head(model.model.norm(hidden))[0, -1].argmax())


def _query_and_row(
    attention: DeepseekV3Attention, normed: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The absorbed query `[1, HEADS, ROW_DIM]` and the latent row `[ROW_DIM]` of one token."""
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(normed)))
    q_nope, q_rope = q.view(1, 1, HEADS, -1).transpose(1, 2).split([NOPE_DIM, ROPE_DIM], dim=-1)
    latent, k_rope = attention.kv_a_proj_with_mqa(normed).split([RANK_DIM, ROPE_DIM], dim=-1)
    latent = attention.kv_a_layernorm(latent)
    q_rope, k_rope = _rope_pairs(q_rope, rope), _rope_pairs(k_rope.unsqueeze(1), rope)
    key_up = _kv_up_projection(attention)[:, :NOPE_DIM]
    q_latent = torch.einsum("bhn,hnr->bhr", q_nope[:, :, 0], key_up)
    query = torch.cat((q_latent, q_rope[:, :, 0]), dim=-1)
    return query, torch.cat((latent[0, 0], k_rope[0, 0, 0]))


def _kv_up_projection(attention: DeepseekV3Attention) -> torch.Tensor:
    """`[HEADS, NOPE_DIM + V_DIM, RANK_DIM]`: nope rows first."""
    weight: torch.Tensor = attention.kv_b_proj.weight
    return weight.view(HEADS, NOPE_DIM + V_DIM, RANK_DIM)


def _rope_pairs(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates the pairs (x0, x1), (x2, x3), ... of `[1, n, 1, ROPE_DIM]`; they come out in halves."""
    cos, sin = (part[:, None, :, : ROPE_DIM // 2] for part in rope)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


@dataclass(frozen=True, slots=True)
class DecodeRank:
    """One decode rank's pages for every layer: attends over its own rows and stores the new rows it owns.

    `kv_pages`: per layer `[num_pages, page_tokens, ROW_DIM]` float32 that holds the rank's rows at `pages` (local row j
    in page `pages[j // page_tokens]`); pages beyond those of the prompt take the new rows. Both on one device.
    """

    shard: Shard
    kv_pages: Sequence[torch.Tensor]
    pages: torch.Tensor

    def partial(
        self, layer: int, position: int, query: torch.Tensor, row: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `row`, of token `position`, if it is this rank's; then `out`, `lse` over the rank's rows."""
        held, num_rows = local_len(self.shard, position), local_len(self.shard, position + 1)
        page_tokens = self.kv_pages[layer].shape[1]
        if num_rows > held:
            self.kv_pages[layer][self.pages[held // page_tokens], held % page_tokens] = row.to(query.device)
        return mla_decode(
            query,
            self.kv_pages[layer],
            self.pages.unsqueeze(0),
            torch.tensor([num_rows], device=query.device),
            scale,
            v_head_dim=RANK_DIM,
        )


def shuffled_pages(shard: Shard, num_tokens: int, page_tokens: int, seed: int) -> torch.Tensor:
    """As many page ids as the rank needs for `num_tokens` tokens, from 0 up, in any order."""
    num_pages = math.ceil(local_len(shard, num_tokens) / page_tokens)
    return torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))


def scattered_rank(
    shard: Shard, rows: Sequence[torch.Tensor], page_tokens: int, spare_tokens: int, seed: int
) -> DecodeRank:
    """A rank whose rows were put into shuffled pages by plain indexing: the form without agents in between."""
    num_tokens = rows[0].shape[0]
    pages = shuffled_pages(shard, num_tokens + spare_tokens, page_tokens, seed)
    owned = torch.from_numpy(owned_tokens(shard, TokenRange(first=0, end=num_tokens)))
    local = torch.arange(len(owned))
    kv_pages = [torch.full((len(pages), page_tokens, ROW_DIM), float("nan")) for _ in rows]
    for layer_pages, layer_rows in zip(kv_pages, rows, strict=True):
        layer_pages[pages[local // page_tokens], local % page_tokens] = layer_rows[owned]
    return DecodeRank(shard, kv_pages, pages)


def softmax_scale(model: DeepseekV3ForCausalLM) -> float:
    return float(model.model.layers[0].self_attn.scaling)


def attend_together(ranks: Sequence[DecodeRank], scale: float, lse_base: LseBase = "e") -> Attend:
    """All ranks in one process: each attends over its rows, `lse_combine` merges. `mla_decode` gives LSEs in base e."""

    def attend(layer: int, position: int, query: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        partials = [rank.partial(layer, position, query, row, scale) for rank in ranks]
        return lse_combine(
            torch.stack([out for out, _ in partials]), torch.stack([lse for _, lse in partials]), lse_base=lse_base
        )

    return attend


def decode_tokens(
    model: DeepseekV3ForCausalLM, first_token: int, num_past: int, num_tokens: int, attend: Attend
) -> list[int]:
    """`num_tokens` greedy tokens after a prompt of `num_past`; `first_token`, which prefill gave, is one of them."""
    tokens = [first_token]
    for position in range(num_past, num_past + num_tokens - 1):
        tokens.append(decode_step(model, tokens[-1], position, attend))
    return tokens
