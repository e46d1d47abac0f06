"""Which rank of a DCP layout owns a token, and where the token's row lies on that rank.

Pure arithmetic on int64 arrays. Every formula follows from one rule: token `t` belongs to rank
`(t // interleave) % size`, and a rank keeps its tokens in order, without gaps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvxfer.layout import Shard, TokenRange

Int64Array = npt.NDArray[np.int64]


def owner(tokens: Int64Array, shard: Shard) -> Int64Array:
    """The rank that owns each token: `[num_tokens]` int64 to `[num_tokens]` int64. `shard.rank` plays no part."""
    return (tokens // shard.interleave) % shard.size


def local_row(tokens: Int64Array, shard: Shard) -> Int64Array:
    """The row of each token on the rank that owns it: `[num_tokens]` int64 to `[num_tokens]` int64.

    `shard.rank` plays no part: a token has one owner, and this is its row there.
    """
    if shard.size == 1:
        return tokens
    if shard.interleave == 1:
        return tokens // shard.size
    return tokens // (shard.size * shard.interleave) * shard.interleave + tokens % shard.interleave


def local_len(shard: Shard, num_tokens: int) -> int:
    """Rows that the rank holds of a sequence's first `num_tokens` tokens. The ranks' lengths add up to `num_tokens`."""
    num_cycles, tail = divmod(num_tokens, shard.size * shard.interleave)
    return num_cycles * shard.interleave + min(max(tail - shard.rank * shard.interleave, 0), shard.interleave)


def owned_tokens(shard: Shard, token_range: TokenRange) -> Int64Array:
    """The tokens of `token_range` that the rank owns, ascending: `[num_owned]` int64, in O(num_owned)."""
    rows = np.arange(local_len(shard, token_range.first), local_len(shard, token_range.end), dtype=np.int64)
    if shard.size == 1:
        return rows
    stride = shard.size * shard.interleave
    first_of_rank = shard.rank * shard.interleave
    if shard.interleave == 1:
        rows *= stride
        rows += first_of_rank
        return rows
    cycles = rows // shard.interleave
    # Row j is token cycle * stride + first_of_rank + j % interleave, and j % interleave is j - cycle * interleave.
    rows += cycles * (stride - shard.interleave)
    rows += first_of_rank
    return rows


def num_pages_of(shard: Shard, page_tokens: int, token_range: TokenRange) -> int:
    """Pages that hold the rank's rows of `token_range`, counted from the page of its first row; 0 where it owns none.

    The first page is `local_len(shard, token_range.first) // page_tokens`.
    """
    first_row = local_len(shard, token_range.first)
    end_row = local_len(shard, token_range.end)
    if end_row == first_row:
        return 0
    return -(-end_row // page_tokens) - first_row // page_tokens
