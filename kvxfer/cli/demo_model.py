"""A small MLA transformer with seeded weights and DeepSeek's KV proportions: rows of 512 + 64 bf16 values.

float32 arithmetic; only the KV rows are rounded to bf16. Attention itself is left to the caller, because the prefill
worker attends over its own pages and the decode ranks attend over the shards they received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

HIDDEN_DIM = 256
KV_RANK = 512
ROPE_DIM = 64
NOPE_DIM = 32
VALUE_DIM = NOPE_DIM + ROPE_DIM
"""As wide as a key, so that torch can use its fused attention."""
ROW_DIM = KV_RANK + ROPE_DIM
VOCAB = 256
SCALE = (NOPE_DIM + ROPE_DIM) ** -0.5
_ROPE_BASE = 10_000.0
_SEED = 20
_QUERY_GAIN = 8.0
"""Random queries attend to all rows alike, and what follows a prompt then soon repeats. Sharper ones look up few rows:
the decoded tokens vary, and a wrong row changes them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`num_draft_layers` follow the `num_layers` of the model and feed no logits: a draft model's KV."""

    num_layers: int
    num_draft_layers: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; `up_key` `[H, NOPE_DIM, KV_RANK]` and `up_value` `[H, VALUE_DIM, KV_RANK]` open a row."""

    query: torch.Tensor  # [HIDDEN_DIM, H * (NOPE_DIM + ROPE_DIM)]
    down: torch.Tensor  # [HIDDEN_DIM, ROW_DIM]
    up_key: torch.Tensor
    up_value: torch.Tensor
    out: torch.Tensor  # [H, VALUE_DIM, HIDDEN_DIM]
    mlp_in: torch.Tensor  # [HIDDEN_DIM, 2 * HIDDEN_DIM]
    mlp_out: torch.Tensor  # [2 * HIDDEN_DIM, HIDDEN_DIM]


@dataclass(frozen=True, slots=True)
class Query:
    """Queries of `n` tokens: `nope` `[n, H, NOPE_DIM]`, `rope` `[n, H, ROPE_DIM]`, rotated."""

    nope: torch.Tensor
    rope: torch.Tensor


class MlaModel:
    """The weights and everything but attention."""

    def __init__(self, shape: ModelShape) -> None:
        """The same shape gives the same weights in every process."""
        self.shape = shape
        generator = torch.Generator().manual_seed(_SEED)

        def weight(*dims: int, fan_in: int) -> torch.Tensor:
            return torch.randn(*dims, generator=generator).mul_(fan_in**-0.5)

        num_heads = shape.num_heads
        self._embedding = weight(VOCAB, HIDDEN_DIM, fan_in=1)
        self._head = weight(HIDDEN_DIM, VOCAB, fan_in=HIDDEN_DIM)
        self._layers = [
            Layer(
                query=weight(HIDDEN_DIM, num_heads * (NOPE_DIM + ROPE_DIM), fan_in=HIDDEN_DIM).mul_(_QUERY_GAIN),
                down=weight(HIDDEN_DIM, ROW_DIM, fan_in=HIDDEN_DIM),
                up_key=weight(num_heads, NOPE_DIM, KV_RANK, fan_in=KV_RANK),
                up_value=weight(num_heads, VALUE_DIM, KV_RANK, fan_in=KV_RANK),
                out=weight(num_heads, VALUE_DIM, HIDDEN_DIM, fan_in=num_heads * VALUE_DIM),
                mlp_in=weight(HIDDEN_DIM, 2 * HIDDEN_DIM, fan_in=HIDDEN_DIM),
                mlp_out=weight(2 * HIDDEN_DIM, HIDDEN_DIM, fan_in=2 * HIDDEN_DIM),
            )
            for _ in range(shape.num_layers + shape.num_draft_layers)
        ]
        self._state = weight(HIDDEN_DIM, HIDDEN_DIM, fan_in=HIDDEN_DIM)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[n]` int64 byte values to `[n, HIDDEN_DIM]`."""
        return torch.index_select(self._embedding, 0, tokens)

    def project(self, layer_idx: int, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[Query, torch.Tensor]:
        """Queries and KV rows, `[n, ROW_DIM]` bf16, of `hidden` `[n, HIDDEN_DIM]` at `positions` `[n]`."""
        layer = self._layers[layer_idx]
        normed = _rms_norm(hidden)
        query = (normed @ layer.query).view(len(hidden), self.shape.num_heads, NOPE_DIM + ROPE_DIM)
        latent, key_rope = torch.split(normed @ layer.down, [KV_RANK, ROPE_DIM], dim=-1)
        rows = torch.cat([_rms_norm(latent), _rotate(key_rope, positions)], dim=-1)
        nope, rope = torch.split(query, [NOPE_DIM, ROPE_DIM], dim=-1)
        return Query(nope, _rotate(rope, positions.unsqueeze(-1))), rows.bfloat16()

    def attend_opened(self, layer_idx: int, query: Query, context: torch.Tensor, num_past: int) -> torch.Tensor:
        """Causal attention of prefill: `context` `[num_past + n, ROW_DIM]` bf16; out `[n, H, VALUE_DIM]`."""
        layer = self._layers[layer_idx]
        latent, rope = torch.split(context.float(), [KV_RANK, ROPE_DIM], dim=-1)
        num_new, num_context = query.nope.shape[0], context.shape[0]
        key = torch.einsum("cr,hdr->hcd", latent, layer.up_key)
        key = torch.cat([key, rope.expand(self.shape.num_heads, -1, -1)], dim=-1)
        value = torch.einsum("cr,hvr->hcv", latent, layer.up_value)
        visible = torch.arange(num_context) <= torch.arange(num_past, num_past + num_new).unsqueeze(-1)
        queries = torch.cat([query.nope, query.rope], dim=-1).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            queries.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask=visible, scale=SCALE
        )
        return out.squeeze(0).transpose(0, 1)

    def absorb(self, layer_idx: int, query: Query, heads: slice) -> torch.Tensor:
        """Queries in latent space, `[n, num_heads, ROW_DIM]`, of some heads: their keys are the KV rows as they are."""
        up_key = self._layers[layer_idx].up_key[heads]
        return torch.cat([torch.einsum("nhd,hdr->nhr", query.nope[:, heads], up_key), query.rope[:, heads]], dim=-1)

    def open_values(self, layer_idx: int, latent: torch.Tensor, heads: slice) -> torch.Tensor:
        """Attention output in latent space, `[n, num_heads, KV_RANK]`, to values, `[n, num_heads, VALUE_DIM]`."""
        return torch.einsum("nhr,hvr->nhv", latent, self._layers[layer_idx].up_value[heads])

    def project_out(self, layer_idx: int, values: torch.Tensor, heads: slice) -> torch.Tensor:
        """What some heads, `[n, num_heads, VALUE_DIM]`, add to the residual: `[n, HIDDEN_DIM]`, to be summed."""
        return torch.einsum("nhv,hvd->nd", values, self._layers[layer_idx].out[heads])

    def feed_forward(self, layer_idx: int, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` after the layer's MLP, residual included."""
        layer = self._layers[layer_idx]
        return hidden + F.silu(_rms_norm(hidden) @ layer.mlp_in) @ layer.mlp_out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, HIDDEN_DIM]` to `[n, VOCAB]`."""
        logits: torch.Tensor = _rms_norm(hidden) @ self._head
        return logits

    def advance_state(self, state: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """A recurrent state `[HIDDEN_DIM, HIDDEN_DIM]` after the tokens of `hidden`, as linear attention keeps one."""
        keys = _rms_norm(hidden)
        return 0.9 * state + keys.T @ (keys @ self._state) / max(len(hidden), 1)


def _rms_norm(values: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(values, values.shape[-1:], eps=1e-6)


def _rotate(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding over the last dimension, halves paired; `positions` broadcasts over the others."""
    frequencies = _ROPE_BASE ** (-torch.arange(0, ROPE_DIM, 2) / ROPE_DIM)
    angles = positions.unsqueeze(-1) * frequencies
    first, second = values.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
