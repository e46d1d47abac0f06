"""lse_combine, scale_partial_ and mask_empty_ against float64 attention over all keys at once."""

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvxfer.errors import KernelContractError
from kvxfer.kernels import lse_combine, mask_empty_, reference, scale_partial_, scale_to_staging
from kvxfer.kernels._launch import runs_triton
from tests.attention import attend, relative_error, shard_attend
from tests.kernels.bitwise import assert_bitwise_equal
from tests.kernels.conftest import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
bases = pytest.mark.parametrize("base", ["e", "2"])


def problem(
    num_ranks: int, heads: int, head_dim: int, lens: list[int], base: str, interleave: int = 1, spread: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shards' outs `[N, B, H, D]` and LSEs, both float64, their local lengths `[N, B]`, and the whole's out and LSE."""
    generator = torch.Generator().manual_seed(num_ranks * 1000 + heads)
    keys = torch.randn(max(lens), 16, generator=generator, dtype=torch.float64)
    values = torch.randn(max(lens), head_dim, generator=generator, dtype=torch.float64)
    query = torch.randn(len(lens), heads, 16, generator=generator, dtype=torch.float64) * spread
    lengths = torch.tensor(lens)
    shards = [
        shard_attend(query, keys, values, lengths, base, rank=rank, size=num_ranks, interleave=interleave)
        for rank in range(num_ranks)
    ]
    outs, lses, local_lens = (torch.stack(parts) for parts in zip(*shards, strict=True))
    whole_out, whole_lse = attend(query, keys, values, lengths, base)
    return outs, lses, local_lens, whole_out, whole_lse


def test_the_triton_kernels_are_what_runs_here() -> None:
    assert runs_triton(torch.empty(0, device=DEVICE)), "run tests/kernels on a GPU or with TRITON_INTERPRET=1"


@pytest.mark.parametrize(
    ("num_ranks", "heads", "head_dim", "interleave", "dtype", "base"),
    [
        (2, 1, 512, 1, torch.float32, "e"),
        (4, 12, 64, 16, torch.float32, "2"),
        (8, 4, 96, 1, torch.bfloat16, "e"),
        (3, 97, 40, 4, torch.float16, "2"),
        (2, 96, 24, 16, torch.bfloat16, "2"),
        (2, 192, 33, 1, torch.float32, "e"),
        (17, 2, 576, 1, torch.float16, "e"),
    ],
)
def test_shards_merge_to_the_whole(
    ops: ModuleType, num_ranks: int, heads: int, head_dim: int, interleave: int, dtype: torch.dtype, base: str
) -> None:
    outs, lses, _, whole_out, whole_lse = problem(num_ranks, heads, head_dim, [61, 3, 1], base, interleave)
    got, lse = ops.lse_combine(outs.to(DEVICE, dtype), lses.float().to(DEVICE), lse_base=base, return_lse=True)
    assert got.dtype == dtype
    assert relative_error(got.cpu(), whole_out) < TOLERANCE[dtype]
    assert relative_error(lse.cpu(), whole_lse) < 1e-5


@bases
def test_a_wrong_base_is_far_off(ops: ModuleType, base: str) -> None:
    outs, lses, _, whole_out, _ = problem(4, 4, 64, [100, 7], base)
    wrong = {"e": "2", "2": "e"}[base]
    right_error = relative_error(
        ops.lse_combine(outs.float().to(DEVICE), lses.float().to(DEVICE), lse_base=base).cpu(), whole_out
    )
    wrong_error = relative_error(
        ops.lse_combine(outs.float().to(DEVICE), lses.float().to(DEVICE), lse_base=wrong).cpu(), whole_out
    )
    assert right_error < 1e-5
    assert wrong_error > 1e-2


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf])
def test_an_empty_shard_weighs_nothing_whatever_it_holds(ops: ModuleType, empty_lse: float) -> None:
    outs, lses, local_lens, whole_out, whole_lse = problem(8, 4, 64, [3, 8, 1], "e")
    assert (local_lens == 0).any()
    assert outs[local_lens == 0].isnan().all()
    lses[local_lens == 0] = empty_lse
    got, lse = ops.lse_combine(outs.float().to(DEVICE), lses.float().to(DEVICE), lse_base="e", return_lse=True)
    assert relative_error(got.cpu(), whole_out) < 1e-5
    assert relative_error(lse.cpu(), whole_lse) < 1e-5


@bases
def test_empty_everywhere_gives_zero_and_minus_infinity(ops: ModuleType, base: str) -> None:
    outs = torch.full((4, 2, 3, 40), math.nan, device=DEVICE)
    lses = torch.full((4, 2, 3), -math.inf, device=DEVICE)
    got, lse = ops.lse_combine(outs, lses, lse_base=base, return_lse=True)
    assert torch.equal(got, torch.zeros_like(got))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


@bases
def test_one_rank_that_dominates_by_200(ops: ModuleType, base: str) -> None:
    outs = torch.randn(4, 2, 3, 64, device=DEVICE)
    lses = torch.zeros(4, 2, 3, device=DEVICE)
    lses[2] = 200.0
    got, lse = ops.lse_combine(outs, lses, lse_base=base, return_lse=True)
    assert torch.equal(got, outs[2])
    assert torch.equal(lse, lses[2])


def test_a_nan_lse_is_not_hidden(ops: ModuleType) -> None:
    lses = torch.zeros(2, 1, 2, device=DEVICE)
    lses[0, 0, 1] = math.nan
    got = ops.lse_combine(torch.ones(2, 1, 2, 16, device=DEVICE), lses, lse_base="e")
    assert torch.equal(got[0, 0], torch.ones(16, device=DEVICE))
    assert got[0, 1].isnan().all()


def test_any_stride(ops: ModuleType) -> None:
    outs, lses, _, whole_out, _ = problem(3, 5, 24, [30, 9], "e")
    outs, lses = outs.float().to(DEVICE), lses.float().to(DEVICE)
    for order in ((3, 1, 0, 2), (2, 0, 3, 1)):
        inverse = [order.index(dim) for dim in range(4)]
        strided = outs.permute(order).contiguous().permute(inverse)
        # Every second LSE of a wider, transposed tensor.
        wide = torch.full((5, 2, 3, 2), math.nan, device=DEVICE)
        wide[..., 0] = lses.permute(2, 1, 0)
        got = ops.lse_combine(strided, wide[..., 0].permute(2, 1, 0), lse_base="e")
        assert relative_error(got.cpu(), whole_out) < 1e-5


def test_offsets_beyond_two_gib(ops: ModuleType) -> None:
    """Shards, and then batch entries, that lie 2^31 elements apart."""
    far = 1 << 31
    outs, lses, _, whole_out, _ = problem(2, 2, 16, [30, 9], "e")
    # Untouched pages take no memory.
    memory = torch.empty(far + 64, dtype=torch.float16, device=DEVICE)
    shards = memory.as_strided((2, 2, 2, 16), (far, 32, 16, 1))
    shards.copy_(outs)
    lses = lses.float().to(DEVICE)
    assert relative_error(ops.lse_combine(shards, lses, lse_base="e").cpu(), whole_out) < TOLERANCE[torch.float16]
    partial, expected = memory.as_strided((2, 2, 16), (far, 16, 1)), outs[1].half().to(DEVICE)
    partial.copy_(expected)
    for tensor in (partial, expected):
        ops.scale_partial_(tensor, lses, 1, lse_base="e")
    assert_bitwise_equal(partial, expected)


@bases
@pytest.mark.parametrize(("num_ranks", "heads", "head_dim"), [(4, 12, 512), (3, 7, 33), (2, 6, 576)])
def test_scaled_partials_sum_to_the_whole(
    ops: ModuleType, num_ranks: int, heads: int, head_dim: int, base: str
) -> None:
    outs, lses, local_lens, whole_out, whole_lse = problem(num_ranks, heads, head_dim, [40, 2, 1], base)
    lses32 = lses.float().to(DEVICE)
    total = torch.zeros(whole_out.shape, dtype=torch.float64)
    for rank in range(num_ranks):
        partial = outs[rank].float().to(DEVICE)
        address = partial.data_ptr()
        lse = ops.scale_partial_(partial, lses32, rank, lse_base=base)
        assert partial.data_ptr() == address
        assert torch.equal(
            partial[local_lens[rank].to(DEVICE) == 0].cpu().nan_to_num(1.0).count_nonzero(), torch.tensor(0)
        )
        assert relative_error(lse.cpu(), whole_lse) < 1e-5
        total += partial.cpu().double()
    assert relative_error(total, whole_out) < 1e-5


def test_scaling_in_place_keeps_strides_and_neighbours(ops: ModuleType) -> None:
    outs, lses, _, _, _ = problem(2, 4, 24, [40, 2], "e")
    memory = torch.full((2, 24, 5), 7.0, device=DEVICE)
    partial = memory[:, :, :4].transpose(1, 2)
    partial.copy_(outs[0].float())
    expected = outs[0].float().to(DEVICE)
    ops.scale_partial_(partial, lses.float().to(DEVICE), 0, lse_base="e")
    ops.scale_partial_(expected, lses.float().to(DEVICE), 0, lse_base="e")
    assert torch.equal(partial, expected)
    assert (memory[:, :, 4] == 7.0).all()


class _LargestNew(TorchFunctionMode):
    """Remembers the largest tensor that an operation made rather than took."""

    num_bytes = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        taken = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in taken:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_path_scales_without_a_second_partial(dtype: torch.dtype) -> None:
    """What it allocates is of the size of the LSEs of all shards."""
    out, lses = torch.ones(4, 6, 512, dtype=dtype), torch.zeros(3, 4, 6)
    with _LargestNew() as largest:
        reference.scale_partial_(out, lses, 1, lse_base="e")
    assert 0 < largest.num_bytes <= lses.nbytes
    assert relative_error(out, torch.full_like(out, 1 / 3)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staging_is_head_major_and_leaves_the_partial(ops: ModuleType, dtype: torch.dtype) -> None:
    outs, lses, _, _, _ = problem(4, 8, 48, [40, 3, 1], "2")
    partial = outs[1].to(DEVICE, dtype)
    before = partial.clone()
    staging = torch.full((4, 3, 2, 48), math.nan, dtype=dtype, device=DEVICE)
    lse_out = torch.empty(3, 8, device=DEVICE)
    ops.scale_to_staging(partial, lses.float().to(DEVICE), 1, staging, lse_base="2", lse_out=lse_out)
    assert torch.equal(partial.nan_to_num(-1.0), before.nan_to_num(-1.0))
    lse = ops.scale_partial_(partial, lses.float().to(DEVICE), 1, lse_base="2")
    assert_bitwise_equal(staging.transpose(0, 1).reshape(3, 8, 48), partial)
    assert torch.equal(lse_out, lse)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mask_empty_by_length_whatever_stood_there(ops: ModuleType, dtype: torch.dtype) -> None:
    lse = (
        torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [2.0, 3.0], [-math.inf, 4.0]], device=DEVICE)
        .t()
        .contiguous()
        .t()
    )
    got = ops.mask_empty_(lse, torch.tensor([0, -1, 5, 1], dtype=dtype, device=DEVICE))
    assert got.data_ptr() == lse.data_ptr()
    low = -math.inf
    assert got.tolist() == [[low, low], [low, low], [2.0, 3.0], [low, 4.0]]


def test_bad_input_is_refused_by_name() -> None:
    outs, lses = torch.zeros(2, 3, 4, 8, device=DEVICE), torch.zeros(2, 3, 4, device=DEVICE)
    with pytest.raises(TypeError, match="lse_base"):
        lse_combine(outs, lses)  # type: ignore[call-overload]
    with pytest.raises(KernelContractError, match=r"^lses: got NoneType, expected a torch.Tensor"):
        lse_combine(outs, None, lse_base="e")  # type: ignore[call-overload]
    with pytest.raises(KernelContractError, match=r"^lse_base: got None, expected 'e' or '2'"):
        lse_combine(outs, lses, lse_base=None)  # type: ignore[call-overload]
    with pytest.raises(KernelContractError, match=r"^lses: got dtype torch.bfloat16, expected torch.float32"):
        lse_combine(outs, lses.bfloat16(), lse_base="e")
    with pytest.raises(KernelContractError, match=r"^lses: got shape \[2, 3, 3\], expected \[2, 3, 4\]"):
        lse_combine(outs, lses[..., :3], lse_base="e")
    with pytest.raises(KernelContractError, match=r"^outs: got dtype torch.float64, expected torch.bfloat16, "):
        lse_combine(outs.double(), lses, lse_base="e")
    with pytest.raises(KernelContractError, match=r"^outs: got 0 shards, expected at least 1"):
        lse_combine(outs[:0], lses[:0], lse_base="e")
    with pytest.raises(KernelContractError, match=r"^lses: got device meta, expected"):
        lse_combine(outs, lses.to("meta"), lse_base="e")


def test_scaling_refuses_bad_input_by_name() -> None:
    outs, lses = torch.zeros(2, 3, 4, 8, device=DEVICE), torch.zeros(2, 3, 4, device=DEVICE)
    staging, lse_out = torch.zeros(2, 3, 2, 8, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(KernelContractError, match=r"^rank: got 2, expected 0 to 1"):
        scale_partial_(outs[0], lses, 2, lse_base="e")
    with pytest.raises(KernelContractError, match=r"^lses: got dtype torch.bfloat16, expected torch.float32"):
        scale_partial_(outs[0], lses.bfloat16(), 0, lse_base="e")
    with pytest.raises(KernelContractError, match=r"^lse_base: got '10', expected 'e' or '2'"):
        scale_partial_(outs[0], lses, 0, lse_base="10")  # type: ignore[arg-type]
    with pytest.raises(KernelContractError, match=r"^out: got dtype torch.float8_e5m2, expected torch.bfloat16, "):
        scale_partial_(outs[0].to(torch.float8_e5m2), lses, 0, lse_base="e")
    with pytest.raises(KernelContractError, match=r"^out: got strides .* whose elements do not share memory"):
        scale_partial_(outs[0, :, :1].expand(3, 4, 8), lses, 0, lse_base="e")
    with pytest.raises(KernelContractError, match=r"^lse_out: got strides .*, expected a contiguous tensor"):
        scale_partial_(outs[0], lses, 0, lse_base="e", lse_out=torch.zeros(4, 3, device=DEVICE).t())
    with pytest.raises(KernelContractError, match=r"^lse_out: got memory .* that overlaps lses"):
        scale_partial_(outs[0], lses, 0, lse_base="e", lse_out=lses[1])
    for got, message in (
        (staging[:, :, :1], r"^staging: got 2 ranks of 1 heads, expected 4 heads together"),
        (staging[..., :7], r"^staging: got shape \[2, 3, 2, 7\], expected \[any, 3, any, 8\]"),
        (staging.bfloat16(), r"^staging: got dtype torch.bfloat16, expected torch.float32"),
        (staging[:1].expand(2, 3, 2, 8), r"^staging: got strides .* whose elements do not share memory"),
        (outs[0].view(2, 3, 2, 8), r"^staging: got memory .* that overlaps out"),
    ):
        with pytest.raises(KernelContractError, match=message):
            scale_to_staging(outs[0], lses, 0, got, lse_base="e", lse_out=lse_out)


def test_masking_refuses_bad_input_by_name() -> None:
    lse, row_lens = torch.zeros(3, 4, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(KernelContractError, match=r"^lse: got dtype torch.float16, expected torch.float32"):
        mask_empty_(lse.half(), row_lens)
    with pytest.raises(KernelContractError, match=r"^lse: got strides .* whose elements do not share memory"):
        mask_empty_(lse[:1].expand(3, 4), row_lens)
    with pytest.raises(KernelContractError, match=r"^row_lens: got shape \[2\], expected \[3\]"):
        mask_empty_(lse, row_lens[:2])
    with pytest.raises(KernelContractError, match=r"^row_lens: got dtype torch.float32, expected torch.int32, "):
        mask_empty_(lse, row_lens.float())
