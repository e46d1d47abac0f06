"""A sum over the bytes of a segment that programs may add up in any order, in words of any width, while they move them.

The bytes count in blocks of 16, the last one filled up with zeros. A block's four little-endian 4-byte words `w` and
its number `i` in the segment give `key(i) * (w[0] * WORD_KEYS[0] + ... + w[3] * WORD_KEYS[3])`, and the sum is that of
all blocks, modulo 2^64. It is linear: a word, a byte, any piece adds its share by itself, wherever the rest is.

What it finds. All keys are odd, and a word is below 2^32, so a change of one word changes the sum: always. Changes of
several words cancel each other only where the keys happen to fit them. A change has the form `2^t * odd` with `t` at
most 31, and keys behave like random odd numbers that know nothing of what went wrong: the chance is `2^-(63 - t)`, at
worst 1 in 2^32 for words that differ in their highest bit alone, mostly about 1 in 2^60. Words of 8 bytes would be
cheaper and worse: two that differ in their highest bit would cancel each other whatever their keys. Against who
chooses changes on purpose nothing here protects: the keys are known.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt

BLOCK_BYTES: Final = 16
MODULUS: Final = 1 << 64
# Any odd numbers with well mixed bits, below 2^63 so that signed arithmetic takes them as they are.
KEY_FIRST: Final = 0x3C6EF372FE94F82B
KEY_STEP: Final = 0x1E3779B97F4A7C15
KEY_FACTOR: Final = 0x3F58476D1CE4E5B9
WORD_KEYS: Final = (0x14D049BB133111EB, 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)

_CHUNK_BLOCKS = 16384  # at a time: what is in between stays in the second-level cache
_U64: Final = np.uint64


def block_keys(first_block: int, num_blocks: int) -> npt.NDArray[np.uint64]:
    """`[num_blocks]` uint64, the keys from block `first_block` on: `KEY_FIRST + i * KEY_STEP`, its upper half folded
    into the lower, times `KEY_FACTOR`, folded again, made odd."""
    keys = np.arange(first_block, first_block + num_blocks, dtype=_U64) * _U64(KEY_STEP) + _U64(KEY_FIRST)
    keys ^= keys >> _U64(32)
    keys *= _U64(KEY_FACTOR)
    keys ^= keys >> _U64(32)
    return keys | _U64(1)


@functools.lru_cache(maxsize=512)
def _chunk_keys(chunk: int) -> npt.NDArray[np.uint64]:
    return block_keys(chunk * _CHUNK_BLOCKS, _CHUNK_BLOCKS)


def row_sum(data: npt.NDArray[np.uint8], offset_bytes: int = 0) -> int:
    """The sum of `data`, `[num_bytes]` uint8, contiguous, that begins `offset_bytes` into the segment: 0 to 2^64 - 1.

    Sums of the parts of a segment, modulo 2^64, give that of the whole.
    """
    first_block, head_bytes = divmod(offset_bytes, BLOCK_BYTES)
    if head_bytes or data.size % BLOCK_BYTES or data.ctypes.data % 8:
        padded = np.zeros(-(-(head_bytes + data.size) // BLOCK_BYTES) * BLOCK_BYTES, dtype=np.uint8)
        padded[head_bytes : head_bytes + data.size] = data
        data = padded
    halves = data.view("<u8").reshape(-1, 2)
    totals = [0, 0, 0, 0]  # of each word of all blocks, times the blocks' keys
    begin = 0
    while begin < len(halves):
        chunk, at = divmod(first_block + begin, _CHUNK_BLOCKS)
        end = min(len(halves), begin + _CHUNK_BLOCKS - at)
        keys = _chunk_keys(chunk)[at : at + end - begin]
        for idx in range(2):
            half = halves[begin:end, idx]
            upper, both = int(np.dot(half >> _U64(32), keys)), int(np.dot(half, keys))
            totals[2 * idx] += both - (upper << 32)
            totals[2 * idx + 1] += upper
        begin = end
    return sum(total * key for total, key in zip(totals, WORD_KEYS, strict=True)) % MODULUS
