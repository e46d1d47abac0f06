"""Attention in float64, whole and split over ranks: what every merge is judged by."""

import math

import torch

Partial = tuple[torch.Tensor, torch.Tensor]


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lens: torch.Tensor, base: str) -> Partial:
    """Attention of `query` `[B, H, K]` over the first `lens[b]` of `keys` `[T, K]`, `values` `[T, D]`, in float64.

    Returns out `[B, H, D]`, NaN where a row has no key as many kernels leave it, and LSE `[B, H]` in `base`.
    """
    scores = torch.einsum("bhk,tk->bht", query.double(), keys.double())
    reachable = torch.arange(len(keys))[None, None] < lens[:, None, None]
    scores = scores.masked_fill(~reachable, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    out = torch.einsum("bht,td->bhd", weights.nan_to_num(), values.double())
    out[lens == 0] = math.nan
    return out, lse / (math.log(2) if base == "2" else 1.0)


def owned(num_tokens: int, rank: int, size: int, interleave: int) -> torch.Tensor:
    """The tokens that a rank owns, in order: `(t // interleave) mod size == rank`, token by token."""
    tokens = torch.arange(num_tokens)
    return tokens[(tokens // interleave) % size == rank]


def shard_attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lens: torch.Tensor,
    base: str,
    *,
    rank: int,
    size: int,
    interleave: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One rank's part of `attend`: out, LSE, and how many keys of this rank each row saw."""
    tokens = owned(len(keys), rank, size, interleave)
    local_lens = (tokens[None] < lens[:, None]).sum(1)
    out, lse = attend(query, keys[tokens], values[tokens], local_lens, base)
    return out, lse, local_lens


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """`‖got - expected‖ / ‖expected‖`; NaN where either holds a NaN."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
