"""Pools as tensors, on the CPU here, against pools in host memory."""

import numpy as np
import torch

from kvxfer.cli.pools import GroupShape, choose_pages, lay_out
from kvxfer.cli.protocol import Expected, PageList, PatternRows
from kvxfer.cli.rows import expected_pool, write_rows
from kvxfer.cli.torch_pool import TorchPool
from kvxfer.layout import LayerRange, Placement, Shard

_SHAPES = [
    GroupShape("kv", LayerRange(0, 3), 20, Placement.SHARDED),
    GroupShape("draft", LayerRange(3, 4), 7, Placement.REPLICATED),
]


def test_rows_are_written_as_in_host_memory() -> None:
    layout, num_bytes = lay_out(_SHAPES, {"kv": 6, "draft": 6}, 4, Shard(), "u8")
    expected = np.full(num_bytes, 9, dtype=np.uint8)
    pool = TorchPool(num_bytes, 9, "cpu")
    pages = choose_pages(3, 6, shuffled=True, seed=1)
    for group, shape in zip(layout.groups, _SHAPES, strict=True):
        rows = PatternRows(seed=3, num_layers=shape.layers.num_layers, num_tokens=11, row_bytes=shape.row_bytes)
        write_rows(expected, group, pages, rows)
        pool.write(group, pages, rows)
    assert np.array_equal(_bytes_of(pool), expected)
    assert pool.device_bytes() == 0
    pool.fill(4)
    assert (_bytes_of(pool) == 4).all()
    pool.close()


def test_what_differs_is_found_where_it_is() -> None:
    layout, num_bytes = lay_out(_SHAPES, {"kv": 6, "draft": 6}, 4, Shard(1, 2, 1), "u8")
    groups = {
        "kv": Expected(
            pages=PageList(first_token=0, end_token=11, pages=[4, 1]),
            source=PatternRows(seed=3, num_layers=3, num_tokens=11, row_bytes=20),
        ),
        "draft": Expected(
            pages=PageList(first_token=0, end_token=11, pages=[4, 1, 0]),
            source=PatternRows(seed=4, num_layers=1, num_tokens=11, row_bytes=7),
        ),
    }
    pool = TorchPool(num_bytes, 9, "cpu")
    assert "the first at byte" in pool.problem(layout, 9, groups)
    content = expected_pool(layout, num_bytes, 9, groups)
    _tensor_of(pool).copy_(torch.from_numpy(content))
    assert pool.problem(layout, 9, groups) == ""
    _tensor_of(pool)[-1] += 1
    assert pool.problem(layout, 9, groups) == (
        f"1 bytes differ, the first at byte {num_bytes - 1} of the pool (outside all groups): got 10, expected 9"
    )
    pool.close()


def test_a_copy_is_timed_and_compared() -> None:
    pool = TorchPool(1000, 9, "cpu")
    for num_bytes in (900, 900, 1000):
        assert pool.copy_across(num_bytes, 0) > 0.0
    pool.close()


def _tensor_of(pool: TorchPool) -> torch.Tensor:
    return pool._tensor


def _bytes_of(pool: TorchPool) -> np.ndarray:
    found: np.ndarray = _tensor_of(pool).numpy()
    return found
