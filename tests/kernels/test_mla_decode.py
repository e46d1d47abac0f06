"""`mla_decode`, the Triton kernels and the torch path, against one float64 softmax over all rows.

Under TRITON_INTERPRET=1 (how `make test` runs this folder) `mla_decode` runs the Triton kernels on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels import _mla_split, reference
from kvxfer.kernels._launch import INTERPRETED
from kvxfer.kernels.mla_decode import attend_torch, mla_decode

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
ATTENDS = {"torch": attend_torch, "triton": _mla_split.attend}
if not INTERPRETED and not torch.cuda.is_available():
    del ATTENDS["triton"]  # the kernels need a GPU or the interpreter; tests/kernels runs under the interpreter
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
V_DIM, ROPE_DIM, SCALE = 32, 16, 0.17


@dataclass(frozen=True, slots=True)
class Case:
    q: torch.Tensor
    kv_pages: torch.Tensor
    page_table: torch.Tensor
    row_lens: torch.Tensor

    def expect_close(self, out: torch.Tensor, lse: torch.Tensor, tolerance: float) -> None:
        expected_out, expected_lse = reference.mla_decode(
            self.q.double(), self.kv_pages, self.page_table, self.row_lens, SCALE, v_head_dim=V_DIM
        )
        assert out.dtype == self.q.dtype
        assert lse.dtype == torch.float32
        error = (out.double() - expected_out).norm() / expected_out.norm().clamp(min=1e-30)
        assert error < tolerance, f"relative error {error:.2e}"
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def make_case(
    lens: list[list[int]], heads: int, page_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Case:
    """Shuffled pages; rows past the longest length of a sequence are NaN, page ids past it out of range."""
    generator = torch.Generator().manual_seed(seed)
    batch, q_len, longest = len(lens), len(lens[0]), max(map(max, lens))
    max_pages = max(1, -(-longest // page_tokens))
    dim = V_DIM + ROPE_DIM
    order = torch.randperm(batch * max_pages, generator=generator).reshape(batch, max_pages) + 1
    kv_pages = torch.full((batch * max_pages + 1, page_tokens, dim), float("nan"))
    page_table = torch.full((batch, max_pages), -1, dtype=torch.int32)
    for sequence, sequence_lens in enumerate(lens):
        for row in range(max(sequence_lens)):
            page = int(order[sequence, row // page_tokens])
            page_table[sequence, row // page_tokens] = page
            kv_pages[page, row % page_tokens] = torch.randn(dim, generator=generator)
    q = torch.randn(batch, q_len, heads, dim, generator=generator)
    return Case(
        q.to(DEVICE, dtype), kv_pages.to(DEVICE, dtype), page_table.to(DEVICE), torch.tensor(lens, device=DEVICE)
    )


def attend_case(attend: Attend, case: Case, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(case.q, case.kv_pages, case.page_table, case.row_lens, SCALE, V_DIM, **options)


@pytest.fixture(params=sorted(ATTENDS))
def attend(request: pytest.FixtureRequest) -> Attend:
    found: Attend = ATTENDS[request.param]
    return found


@pytest.mark.parametrize("heads", [1, 12, 16, 20, 96, 97])
def test_any_number_of_heads(attend: Attend, heads: int) -> None:
    case = make_case([[70], [1]], heads, page_tokens=16)
    case.expect_close(*attend_case(attend, case), 1e-6)


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 128])
def test_any_page_size_and_partial_last_pages(attend: Attend, page_tokens: int) -> None:
    case = make_case([[63], [64], [65], [0], [130]], 16, page_tokens)
    case.expect_close(*attend_case(attend, case), 1e-6)


@pytest.mark.parametrize("heads", [16, 24, 40])
def test_fp16(attend: Attend, heads: int) -> None:
    case = make_case([[100], [7]], heads, page_tokens=64, dtype=torch.float16)
    case.expect_close(*attend_case(attend, case), 1e-3)


def test_bf16_on_the_torch_path() -> None:
    case = make_case([[100], [7]], 16, page_tokens=16, dtype=torch.bfloat16)
    case.expect_close(*attend_case(attend_torch, case), 5e-3)


@pytest.mark.parametrize("heads", [16, 40])
def test_no_rows_give_zero_and_minus_infinity_whatever_lies_in_the_pages(attend: Attend, heads: int) -> None:
    case = make_case([[0, 0], [0, 3]], heads, page_tokens=4)
    out, lse = attend_case(attend, case)
    case.expect_close(out, lse, 1e-6)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[1, 0], torch.zeros_like(out[1, 0]))
    assert bool((lse[0] == float("-inf")).all())
    assert bool((lse[1, 0] == float("-inf")).all())


@pytest.mark.parametrize("q_len", [2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 16])
def test_speculative_verify_over_a_split_context(attend: Attend, q_len: int, interleave: int) -> None:
    """Position i of q_len sees the first L - q_len + 1 + i tokens; each of 3 ranks holds its own rows of them."""
    num_ranks, num_tokens, heads = 3, 75, 4
    whole = make_case([[num_tokens - q_len + 1 + i for i in range(q_len)]], heads, page_tokens=8, seed=q_len)
    outs, lses = [], []
    for rank in range(num_ranks):
        owned = [t for t in range(num_tokens) if t // interleave % num_ranks == rank]
        pages = whole.page_table[0, torch.tensor(owned) // 8].long()
        rows = whole.kv_pages[pages, torch.tensor(owned) % 8]
        seen = [[sum(t < int(length) for t in owned) for length in whole.row_lens[0]]]
        table = torch.arange(len(owned), dtype=torch.int64, device=DEVICE).flip(0).unsqueeze(0)
        shard = Case(whole.q, rows.flip(0).unsqueeze(1), table, torch.tensor(seen, device=DEVICE))
        out, lse = attend_case(attend, shard)
        outs.append(out.double())
        lses.append(lse.double())
    weights = torch.softmax(torch.stack(lses), dim=0).unsqueeze(-1)
    merged = (torch.stack(outs) * weights).sum(0).float()
    whole.expect_close(merged, torch.logsumexp(torch.stack(lses), dim=0).float(), 1e-6)


@pytest.mark.skipif("triton" not in ATTENDS, reason="the Triton kernels need a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_splits_merge_to_the_same_result_also_where_some_are_empty(num_splits: int, dtype: torch.dtype) -> None:
    case = make_case([[300], [65], [2], [0]], 16, page_tokens=64, dtype=dtype)
    out, lse = attend_case(_mla_split.attend, case, num_splits=num_splits)
    case.expect_close(out, lse, 1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.skipif("triton" not in ATTENDS, reason="the Triton kernels need a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_length_beyond_the_page_table_shows_as_nan(num_splits: int) -> None:
    case = make_case([[64], [64]], 2, page_tokens=16)
    case.row_lens[0] = 65
    out, lse = attend_case(_mla_split.attend, case, num_splits=num_splits)
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all())


def test_pages_of_a_larger_pool_with_a_page_offset_beyond_32_bits(attend: Attend) -> None:
    """The second page lies 2^31 elements after the first: what lies between is never touched."""
    pool = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE)
    small = make_case([[8]], 4, page_tokens=4, dtype=torch.float16)
    kv_pages = pool.as_strided((2, 4, V_DIM + ROPE_DIM), (2**31, V_DIM + ROPE_DIM + 16, 1))
    for new, old in enumerate(small.page_table[0].tolist()):
        kv_pages[new] = small.kv_pages[old]
    case = Case(small.q, kv_pages, torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE), small.row_lens)
    case.expect_close(*attend_case(attend, case), 1e-3)


def test_one_position_drops_the_position_dimension_and_strides_are_honoured() -> None:
    case = make_case([[40], [13]], 6, page_tokens=8)
    q = case.q.squeeze(1)
    wide = torch.full((2, 6, 2 * q.shape[2]), float("nan"), device=DEVICE)
    wide[..., : q.shape[2]] = q
    lens = case.row_lens.squeeze(1).int()
    strided = wide[..., : q.shape[2]]
    out, lse = mla_decode(strided, case.kv_pages, case.page_table.long(), lens, SCALE, v_head_dim=V_DIM)
    assert out.shape == (2, 6, V_DIM)
    assert lse.shape == (2, 6)
    case.expect_close(out.unsqueeze(1), lse.unsqueeze(1), 1e-6)
    only = mla_decode(q, case.kv_pages, case.page_table, lens, SCALE, v_head_dim=V_DIM, return_lse=False)
    torch.testing.assert_close(only, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_reference_takes_the_place_of_the_op(dtype: torch.dtype) -> None:
    case = make_case([[40, 41], [0, 1]], 6, page_tokens=8, dtype=dtype)
    for q, lens in ((case.q, case.row_lens), (case.q[:, 0], case.row_lens[:, 0])):
        arguments = (q, case.kv_pages, case.page_table, lens, SCALE)
        ours, theirs = (op(*arguments, v_head_dim=V_DIM) for op in (mla_decode, reference.mla_decode))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)  # shapes and dtypes are equal
        only = reference.mla_decode(*arguments, v_head_dim=V_DIM, return_lse=False)
        torch.testing.assert_close(only, theirs[0], rtol=0.0, atol=0.0)


def test_no_sequences_and_no_pages() -> None:
    case = make_case([[5]], 2, page_tokens=4)
    out, lse = mla_decode(case.q[:0], case.kv_pages, case.page_table[:0], case.row_lens[:0], SCALE, v_head_dim=V_DIM)
    assert out.shape == (0, 1, 2, V_DIM)
    assert lse.shape == (0, 1, 2)
    empty = torch.zeros_like(case.row_lens)
    out, lse = mla_decode(case.q, case.kv_pages[:0], case.page_table[:, :0], empty, SCALE, v_head_dim=V_DIM)
    assert bool((out == 0).all())
    assert bool((lse == float("-inf")).all())


def test_the_lse_is_base_e_and_not_base_2() -> None:
    case = make_case([[1]], 2, page_tokens=1)
    _, lse = mla_decode(case.q, case.kv_pages, case.page_table, case.row_lens, SCALE, v_head_dim=V_DIM)
    score = (case.q[0, 0] @ case.kv_pages[case.page_table[0, 0], 0]) * SCALE
    torch.testing.assert_close(lse[0, 0], score, rtol=1e-5, atol=1e-5)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "q shape": ({"q": torch.zeros(2, 48)}, "q: got shape"),
    "q dtype": ({"q": torch.zeros(1, 1, 2, 48, dtype=torch.float64)}, "q: got torch.float64"),
    "q stride": ({"q": torch.zeros(1, 1, 48, 2).transpose(2, 3)}, "q: got shape"),
    "v_head_dim": ({"v_head_dim": 49}, "v_head_dim: got 49, expected 1 to 48"),
    "scale": ({"scale": 0.0}, "scale: got 0.0, expected a positive number"),
    "kv row": ({"kv_pages": torch.zeros(4, 4, 40)}, "kv_pages: got shape"),
    "kv dtype": ({"kv_pages": torch.zeros(4, 4, 48, dtype=torch.float16)}, "kv_pages: got torch.float16"),
    "kv stride": ({"kv_pages": torch.zeros(4, 48, 4).transpose(1, 2)}, "kv_pages: got strides"),
    "table shape": ({"page_table": torch.zeros(2, 2, dtype=torch.int32)}, "page_table: got shape"),
    "table dtype": ({"page_table": torch.zeros(1, 2)}, "page_table: got torch.float32"),
    "table stride": ({"page_table": torch.zeros(1, 4, dtype=torch.int32)[:, ::2]}, "page_table: got strides"),
    "lens shape": ({"row_lens": torch.zeros(1, 3, dtype=torch.int32)}, "row_lens: got shape"),
    "lens dtype": ({"row_lens": torch.zeros(1, 1)}, "row_lens: got torch.float32"),
    "lens device": ({"row_lens": torch.zeros(1, 1, dtype=torch.int32, device="meta")}, "row_lens: got"),
    "too long": ({"row_lens": torch.tensor([[9]])}, "row_lens: got 9 to 9, expected 0 to 8"),
    "negative": ({"row_lens": torch.tensor([[-1]])}, "row_lens: got -1"),
    "page id": ({"page_table": torch.tensor([[0, 4]])}, r"page_table\[0, 1\]: got page 4, expected 0 to 3"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_arguments_are_named(name: str) -> None:
    change, message = BAD[name]
    good: dict[str, Any] = {
        "q": torch.zeros(1, 1, 2, 48),
        "kv_pages": torch.zeros(4, 4, 48),
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "row_lens": torch.tensor([[5]]),
        "scale": SCALE,
        "v_head_dim": V_DIM,
    }
    with pytest.raises(KernelContractError, match=message):
        mla_decode(**{**good, **change})
