"""copy_rows and gather_rows: byte-exact against a copy row by row, guard bytes untouched."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import kvxfer.kernels
from kvxfer.errors import KernelContractError
from kvxfer.kernels import copy_rows, gather_rows, reference
from tests.kernels.bitwise import assert_bitwise_equal
from tests.kernels.conftest import DEVICE

# The reference works on addresses of host memory only.
OPS = [kvxfer.kernels] if DEVICE == "cuda" else [kvxfer.kernels, reference]
all_ops = pytest.mark.parametrize("ops", OPS, ids=lambda module: module.__name__)


@dataclass(frozen=True)
class Table:
    """Rows at `base + row * stride` in every layer, with what lies between and around them."""

    memory: torch.Tensor
    rows: torch.Tensor
    ptrs: torch.Tensor


def make_table(num_layers: int, num_rows: int, row_bytes: int, stride: int, shift: int, seed: int) -> Table:
    """A table whose layers begin `shift` bytes off an allocation; the bytes are random."""
    generator = torch.Generator().manual_seed(seed)
    layer_bytes = shift + num_rows * stride + 32
    memory = torch.randint(0, 256, (num_layers, layer_bytes), dtype=torch.uint8, generator=generator).to(DEVICE)
    rows = memory[:, shift : shift + num_rows * stride].view(num_layers, num_rows, stride)[:, :, :row_bytes]
    ptrs = torch.tensor([memory[layer].data_ptr() + shift for layer in range(num_layers)], device=DEVICE)
    return Table(memory, rows, ptrs)


def some_rows(num: int, of: int, seed: int) -> torch.Tensor:
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:num].to(DEVICE)


# Row bytes, source stride, destination stride, source shift, destination shift: 16, 8, 4, 2 and 1 byte words.
GEOMETRIES = [
    pytest.param(1152, 1152, 1152, 0, 0, id="mla-bf16"),
    pytest.param(576, 1152, 576, 0, 0, id="mla-fp8-strided"),
    pytest.param(656, 656, 1312, 0, 16, id="fp8-with-scales"),
    pytest.param(1152, 1152, 1160, 0, 0, id="word-8"),
    pytest.param(132, 132, 136, 0, 0, id="word-4"),
    pytest.param(50, 64, 50, 0, 2, id="word-2"),
    pytest.param(7, 13, 11, 5, 3, id="word-1"),
    pytest.param(1152, 1152, 1152, 8, 0, id="base-off-by-8"),
    pytest.param(1152, 1152, 1152, 1, 1, id="base-off-by-1"),
    pytest.param(20000, 20000, 20000, 0, 0, id="row-beyond-a-tile"),
]


@all_ops
@pytest.mark.parametrize(("row_bytes", "src_stride", "dst_stride", "src_shift", "dst_shift"), GEOMETRIES)
def test_copy_moves_exactly_the_rows(
    ops: ModuleType, row_bytes: int, src_stride: int, dst_stride: int, src_shift: int, dst_shift: int
) -> None:
    src = make_table(2, 12, row_bytes, src_stride, src_shift, seed=1)
    dst = make_table(2, 15, row_bytes, dst_stride, dst_shift, seed=2)
    from_rows, to_rows = some_rows(9, 12, seed=3), some_rows(9, 15, seed=4)
    expected = dst.memory.clone()
    expected_rows = expected[:, dst_shift : dst_shift + 15 * dst_stride].view(2, 15, dst_stride)
    for layer in range(2):
        for from_row, to_row in zip(from_rows.tolist(), to_rows.tolist(), strict=True):
            expected_rows[layer, to_row, :row_bytes] = src.rows[layer, from_row]
    ops.copy_rows(src.ptrs, from_rows, dst.ptrs, to_rows, row_bytes, src_stride, dst_stride)
    assert_bitwise_equal(dst.memory, expected)


@all_ops
@pytest.mark.parametrize(("row_bytes", "stride", "_dst_stride", "shift", "out_shift"), GEOMETRIES)
def test_gather_lays_rows_end_to_end(
    ops: ModuleType, row_bytes: int, stride: int, _dst_stride: int, shift: int, out_shift: int
) -> None:
    src = make_table(3, 10, row_bytes, stride, shift, seed=5)
    rows = some_rows(7, 10, seed=6)
    size = 3 * 7 * row_bytes
    memory = torch.full((size + 64,), 0xAB, dtype=torch.uint8, device=DEVICE)
    ops.gather_rows(src.ptrs, rows, memory[out_shift : out_shift + size], row_bytes, stride)
    expected = torch.full_like(memory, 0xAB)
    expected[out_shift : out_shift + size] = src.rows[:, rows].reshape(-1)
    assert_bitwise_equal(memory, expected)


def test_layers_of_different_alignment_in_one_launch() -> None:
    aligned, shifted = make_table(1, 8, 64, 64, 0, seed=7), make_table(1, 8, 64, 64, 3, seed=8)
    rows = some_rows(8, 8, seed=9)
    out = torch.zeros(2 * 8 * 64, dtype=torch.uint8, device=DEVICE)
    gather_rows(torch.cat([aligned.ptrs, shifted.ptrs]), rows, out, 64, 64)
    assert_bitwise_equal(out, torch.cat([aligned.rows[:, rows], shifted.rows[:, rows]]))


@pytest.mark.parametrize("max_ctas", [1, 2, 5])
def test_few_programs_stride_over_all_tiles(max_ctas: int) -> None:
    src = make_table(3, 40, 1152, 1152, 0, seed=10)
    rows = some_rows(40, 40, seed=11)
    out = torch.zeros(3 * 40 * 1152, dtype=torch.uint8, device=DEVICE)
    gather_rows(src.ptrs, rows, out, 1152, 1152, max_ctas=max_ctas)
    assert_bitwise_equal(out, src.rows[:, rows])


def test_more_tiles_than_a_grid_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.kernels.rows.MAX_GRID", 2)
    src, dst = make_table(5, 9, 1152, 1152, 0, seed=16), make_table(5, 9, 1152, 1152, 0, seed=17)
    rows, to_rows = some_rows(9, 9, seed=18), some_rows(9, 9, seed=19)
    copy_rows(src.ptrs, rows, dst.ptrs, to_rows, 1152, 1152, 1152)
    assert_bitwise_equal(dst.rows[:, to_rows], src.rows[:, rows])


def test_rows_beyond_four_gib() -> None:
    """Offsets are 64-bit: two rows of a sparse table that lie more than 2^32 bytes apart."""
    stride = 1 << 30
    memory = torch.empty(5 * stride + 64, dtype=torch.uint8, device=DEVICE)  # untouched pages take no memory
    far = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    memory[5 * stride : 5 * stride + 64] = far
    rows = torch.tensor([5], device=DEVICE)
    out = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    gather_rows(torch.tensor([memory.data_ptr()], device=DEVICE), rows, out, 64, stride)
    assert_bitwise_equal(out, far)


def test_nothing_to_do_launches_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    ptrs = torch.zeros(2, dtype=torch.int64, device=DEVICE)  # addresses that would fault
    gather_rows(ptrs, none, torch.empty(0, dtype=torch.uint8, device=DEVICE), 64, 64)
    copy_rows(none, none, none, none, 64, 64, 64)


def refused(argument: str, **changed: object) -> None:
    table = make_table(2, 4, 16, 16, 0, seed=12)
    good: dict[str, object] = {
        "layer_ptrs": table.ptrs,
        "rows": some_rows(4, 4, seed=13),
        "out": torch.empty(128, dtype=torch.uint8, device=DEVICE),
        "row_bytes": 16,
        "row_stride": 16,
    }
    with pytest.raises(KernelContractError, match=rf"^{argument}: got .*expected"):
        gather_rows(**{**good, **changed})  # type: ignore[arg-type]


def test_bad_input_is_refused_by_name() -> None:
    refused("rows", rows=torch.zeros(4, dtype=torch.int32, device=DEVICE))
    refused("rows", rows=torch.zeros(8, dtype=torch.int64, device=DEVICE)[::2])
    refused("layer_ptrs", layer_ptrs=torch.zeros(2, 2, dtype=torch.int64, device=DEVICE))
    refused("out", out=torch.empty(127, dtype=torch.uint8, device=DEVICE))
    refused("out", out=torch.empty(128, dtype=torch.int8, device=DEVICE))
    refused("out", out=torch.empty(128, dtype=torch.uint8, device="meta"))
    refused("row_bytes", row_bytes=0)
    refused("row_stride", row_stride=15)
    refused("max_ctas", max_ctas=0)


def test_copy_refuses_tables_that_do_not_match() -> None:
    table = make_table(2, 4, 16, 16, 0, seed=14)
    rows = some_rows(4, 4, seed=15)
    with pytest.raises(KernelContractError, match=r"^dst_layer_ptrs: got shape \[1\], expected \[2\]"):
        copy_rows(table.ptrs, rows, table.ptrs[:1], rows, 16, 16, 16)
    with pytest.raises(KernelContractError, match=r"^dst_rows: got shape \[3\], expected \[4\]"):
        copy_rows(table.ptrs, rows, table.ptrs, rows[:3], 16, 16, 16)
    with pytest.raises(KernelContractError, match=r"^dst_rows: got dtype torch.int32, expected torch.int64"):
        copy_rows(table.ptrs, rows, table.ptrs, rows.int(), 16, 16, 16)
    with pytest.raises(KernelContractError, match=r"^dst_layer_ptrs: got strides \(2,\) .*, expected a contiguous"):
        copy_rows(table.ptrs, rows, table.ptrs.repeat(2)[::2], rows, 16, 16, 16)
    with pytest.raises(KernelContractError, match=r"^src_row_stride: got 15, expected at least row_bytes = 16"):
        copy_rows(table.ptrs, rows, table.ptrs, rows, 16, 15, 16)
    with pytest.raises(KernelContractError, match=r"^dst_row_stride: got 8, expected at least row_bytes = 16"):
        copy_rows(table.ptrs, rows, table.ptrs, rows, 16, 16, 8)
