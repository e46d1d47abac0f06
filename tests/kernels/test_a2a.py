"""The all-to-all's buffers: packing bit by bit, merging what comes in, and the layout between them."""

import math
from types import ModuleType

import pytest
import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels import A2ALayout, pack_a2a, unpack_combine
from tests.attention import relative_error
from tests.kernels.bitwise import assert_bitwise_equal
from tests.kernels.conftest import DEVICE
from tests.kernels.test_combine import TOLERANCE, problem

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, *FP8]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaNs of every kind among them."""
    *outer, last = shape
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (*outer, last * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).to(DEVICE)


def buffer_of(layout: A2ALayout) -> torch.Tensor:
    return torch.full((layout.total_bytes + 32,), 0xCD, dtype=torch.uint8, device=DEVICE)


def four_copies(out: torch.Tensor, lse: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the slots hold in the end: payload and LSEs split by peer, each made contiguous, as bytes."""
    batch, heads, _ = out.shape
    out_bytes = out.contiguous().view(torch.uint8)
    payload = out_bytes.view(batch, world, heads // world, -1).transpose(0, 1).contiguous().view(world, -1)
    lses = lse.contiguous().view(batch, world, heads // world).transpose(0, 1).contiguous()
    return payload, lses.view(world, -1).view(torch.uint8)


def check_packed(buffer: torch.Tensor, layout: A2ALayout, payload: torch.Tensor, lses: torch.Tensor) -> None:
    slots = buffer[: layout.total_bytes].view(layout.world, layout.slot_bytes)
    assert_bitwise_equal(slots[:, : layout.payload_bytes], payload)
    assert_bitwise_equal(slots[:, layout.lse_offset_bytes :][:, : layout.lse_bytes], lses)
    assert (buffer[layout.total_bytes :] == 0xCD).all()


@all_dtypes
@pytest.mark.parametrize(
    ("world", "batch", "heads", "head_dim"),
    [
        (1, 3, 4, 64),
        (2, 1, 128, 512),
        (4, 5, 12, 33),
        (8, 2, 96, 576),
        (3, 2, 192, 24),
        (97, 1, 97, 7),
        (2, 2, 2, 2052),
    ],
)
def test_pack_equals_four_copies_bit_by_bit(
    ops: ModuleType, world: int, batch: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    layout = A2ALayout(world, batch, heads, head_dim, dtype)
    out, lse = random_bits((batch, heads, head_dim), dtype, seed=1), random_bits((batch, heads), torch.float32, seed=2)
    send = buffer_of(layout)
    ops.pack_a2a(out, lse, send, layout)
    check_packed(send, layout, *four_copies(out, lse, world))


@all_dtypes
def test_pack_takes_any_stride(ops: ModuleType, dtype: torch.dtype) -> None:
    layout = A2ALayout(4, 3, 8, 40, dtype)
    wide = random_bits((8, 3, 48), dtype, seed=3)
    columns = random_bits((40, 3, 8), dtype, seed=4)
    odd = random_bits((3 * 8 * 43 + 1,), dtype, seed=5)[1:].view(3, 8, 43)
    lse = random_bits((8, 3, 2), torch.float32, seed=6)[:, :, 1].t()
    for out in (wide[:, :, 4:44].transpose(0, 1), columns.permute(1, 2, 0), odd[:, :, :40]):
        send = buffer_of(layout)
        ops.pack_a2a(out, lse, send, layout)
        check_packed(send, layout, *four_copies(out, lse, 4))


def test_a_row_broadcast_over_the_batch(ops: ModuleType) -> None:
    layout = A2ALayout(2, 3, 4, 16, torch.bfloat16)
    out = random_bits((1, 4, 16), torch.bfloat16, seed=7).expand(3, 4, 16)
    lse = random_bits((1, 4), torch.float32, seed=8).expand(3, 4)
    send = buffer_of(layout)
    ops.pack_a2a(out, lse, send, layout)
    check_packed(send, layout, *four_copies(out, lse, 2))


@all_dtypes
@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64])
def test_rows_without_keys_are_sent_empty(ops: ModuleType, dtype: torch.dtype, lens_dtype: torch.dtype) -> None:
    layout = A2ALayout(2, 4, 4, 24, dtype)
    out, lse = random_bits((4, 4, 24), dtype, seed=9), random_bits((4, 4), torch.float32, seed=10)
    row_lens = torch.tensor([5, 0, -3, 1], dtype=lens_dtype, device=DEVICE)
    send = buffer_of(layout)
    ops.pack_a2a(out, lse, send, layout, row_lens=row_lens)
    kept_out, kept_lse = out.clone(), lse.clone()
    kept_out.view(torch.uint8)[1:3] = 0
    kept_lse[1:3] = -math.inf
    check_packed(send, layout, *four_copies(kept_out, kept_lse, 2))


def exchange(
    ops: ModuleType, outs: torch.Tensor, lses: torch.Tensor, layout: A2ALayout, to: int, lens: torch.Tensor | None
) -> torch.Tensor:
    """The receive buffer of rank `to` once all ranks have packed: the slots that they addressed to it."""
    sends = []
    for rank in range(layout.world):
        send = torch.empty(layout.total_bytes, dtype=torch.uint8, device=DEVICE)
        ops.pack_a2a(outs[rank], lses[rank], send, layout, row_lens=None if lens is None else lens[rank])
        sends.append(send.view(layout.world, -1)[to])
    return torch.cat(sends)


@pytest.mark.parametrize(
    ("dtype", "base", "fill"),
    [
        (torch.float32, "e", math.nan),
        (torch.float32, "2", 0.0),
        (torch.float16, "2", -math.inf),
        (torch.bfloat16, "e", math.inf),
    ],
)
def test_every_rank_gets_its_heads_of_the_whole(ops: ModuleType, dtype: torch.dtype, base: str, fill: float) -> None:
    """L = 3 over 8 ranks: most are empty, their outputs NaN and their LSEs whatever a kernel leaves there."""
    world, heads = 8, 8
    outs, lses, local_lens, whole_out, whole_lse = problem(world, heads, 72, [3, 20, 1], base)
    lses[local_lens == 0] = fill
    layout = A2ALayout(world, 3, heads, 72, dtype)
    parts, part_lses, lens = outs.to(DEVICE, dtype), lses.float().to(DEVICE), local_lens.to(DEVICE)
    recv = exchange(ops, parts, part_lses, layout, 5, lens)
    got, lse = ops.unpack_combine(recv, layout, lse_base=base, return_lse=True)
    assert relative_error(got.cpu(), whole_out[:, 5:6]) < TOLERANCE[dtype]
    assert relative_error(lse.cpu(), whole_lse[:, 5:6]) < 1e-5


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_payload_merges_to_bf16_with_its_scale(ops: ModuleType, dtype: torch.dtype) -> None:
    outs, lses, _, _, _ = problem(2, 4, 64, [50, 9], "e")
    scale = 0.03125
    quantised = (outs / scale).to(DEVICE, torch.float32).clamp(-200, 200).to(dtype)
    layout = A2ALayout(2, 2, 4, 64, dtype)
    recv = exchange(ops, quantised, lses.float().to(DEVICE), layout, 1, None)
    got = ops.unpack_combine(recv, layout, lse_base="e", scale=scale)
    expected = ops.lse_combine(quantised.float(), lses.float().to(DEVICE), lse_base="e")[:, 2:] * scale
    assert got.dtype == torch.bfloat16
    assert relative_error(got.cpu(), expected.cpu()) < 1e-2


def test_results_go_where_they_are_wanted(ops: ModuleType) -> None:
    outs, lses, _, whole_out, whole_lse = problem(2, 4, 24, [50, 9], "e")
    layout = A2ALayout(2, 2, 4, 24, torch.float32)
    recv = exchange(ops, outs.float().to(DEVICE), lses.float().to(DEVICE), layout, 0, None)
    memory = torch.full((2, 24, 3), 7.0, device=DEVICE)
    out, lse_out = memory[:, :, :2].transpose(1, 2), torch.empty(2, 2, device=DEVICE)
    got, lse = ops.unpack_combine(recv, layout, lse_base="e", return_lse=True, out=out, lse_out=lse_out)
    assert got.data_ptr() == out.data_ptr()
    assert lse.data_ptr() == lse_out.data_ptr()
    assert relative_error(out.cpu(), whole_out[:, :2]) < 1e-5
    assert relative_error(lse_out.cpu(), whole_lse[:, :2]) < 1e-5
    assert (memory[:, :, 2] == 7.0).all()


def test_offsets_beyond_two_gib() -> None:
    """The rows of the second batch entry lie 2^31 elements further on, in `out` and in the LSE."""
    far = 1 << 31
    layout = A2ALayout(2, 2, 2, 16, torch.float8_e5m2)
    # Untouched pages take no memory.
    out = (
        torch.empty(far + 32, dtype=torch.uint8, device=DEVICE).view(layout.dtype).as_strided((2, 2, 16), (far, 16, 1))
    )
    bits = random_bits((2, 2, 16), layout.dtype, seed=11)
    out.view(torch.uint8).copy_(bits.view(torch.uint8))
    lse = random_bits((2, 2), torch.float32, seed=12)
    send = buffer_of(layout)
    pack_a2a(out, lse, send, layout)
    check_packed(send, layout, *four_copies(bits, lse, 2))


def test_layout_sizes_are_whole_words() -> None:
    layout = A2ALayout(8, 3, 24, 7, torch.float8_e4m3fn)
    assert (layout.payload_bytes, layout.lse_offset_bytes, layout.lse_bytes) == (63, 64, 36)
    assert (layout.slot_bytes, layout.total_bytes) == (112, 896)
    assert A2ALayout(2, 0, 4, 8, torch.float32).total_bytes == 0


def test_an_empty_batch_is_nothing() -> None:
    layout = A2ALayout(2, 0, 4, 8, torch.float32)
    none = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    pack_a2a(torch.empty(0, 4, 8, device=DEVICE), torch.empty(0, 4, device=DEVICE), none, layout)
    out, lse = unpack_combine(none, layout, lse_base="e", return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((3, 1, 128, 8, torch.float32), r"^heads: got 128, expected a multiple of the 3 ranks"),
        ((0, 1, 128, 8, torch.float32), r"^world: got 0, expected at least 1"),
        ((2, -1, 128, 8, torch.float32), r"^batch: got -1, expected at least 0"),
        ((2, 1, 128, 0, torch.float32), r"^head_dim: got 0, expected at least 1"),
        ((2, 1, 128, 8, torch.float64), r"^dtype: got torch.float64, expected one of torch.bfloat16, "),
    ],
)
def test_layouts_that_cannot_be(fields: tuple[int, int, int, int, torch.dtype], message: str) -> None:
    with pytest.raises(KernelContractError, match=message):
        A2ALayout(*fields)


def test_bad_input_is_refused_by_name() -> None:
    layout = A2ALayout(2, 2, 4, 8, torch.bfloat16)
    out, lse = torch.zeros(2, 4, 8, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    send = buffer_of(layout)
    with pytest.raises(KernelContractError, match=r"^out: got dtype torch.float32, expected torch.bfloat16"):
        pack_a2a(out.float(), lse, send, layout)
    with pytest.raises(KernelContractError, match=r"^out: got shape \[2, 3, 8\], expected \[2, 4, 8\]"):
        pack_a2a(out[:, :3], lse, send, layout)
    with pytest.raises(KernelContractError, match=r"^lse: got dtype torch.bfloat16, expected torch.float32"):
        pack_a2a(out, lse.bfloat16(), send, layout)
    with pytest.raises(KernelContractError, match=r"^send: got 31 bytes, expected at least 160"):
        pack_a2a(out, lse, send[:31], layout)
    with pytest.raises(KernelContractError, match=r"^send: got address .*, expected a multiple of 16"):
        pack_a2a(out, lse, send[1:], layout)
    with pytest.raises(KernelContractError, match=r"^send: got memory .* that overlaps out"):
        pack_a2a(send[32:160].view(torch.bfloat16).view(2, 4, 8), lse, send, layout)
    with pytest.raises(KernelContractError, match=r"^send: got memory .* that overlaps lse"):
        pack_a2a(out, send[32:64].view(torch.float32).view(2, 4), send, layout)
    with pytest.raises(KernelContractError, match=r"^send: got strides \(2,\) .*, expected a contiguous tensor"):
        pack_a2a(out, lse, torch.zeros(400, dtype=torch.uint8, device=DEVICE)[::2], layout)
    with pytest.raises(KernelContractError, match=r"^send: got device meta, expected"):
        pack_a2a(out, lse, send.to("meta"), layout)
    with pytest.raises(KernelContractError, match=r"^row_lens: got dtype torch.float32, expected torch.int32, "):
        pack_a2a(out, lse, send, layout, row_lens=torch.zeros(2, device=DEVICE))


def test_unpacking_refuses_bad_input_by_name() -> None:
    layout = A2ALayout(2, 2, 4, 8, torch.bfloat16)
    send, lse = buffer_of(layout), torch.zeros(2, 4, device=DEVICE)
    with pytest.raises(TypeError, match="lse_base"):
        unpack_combine(send, layout)  # type: ignore[call-overload]
    with pytest.raises(KernelContractError, match=r"^recv: got 159 bytes, expected at least 160"):
        unpack_combine(send[:159], layout, lse_base="e")
    with pytest.raises(KernelContractError, match=r"^out: got dtype torch.float32, expected torch.bfloat16"):
        unpack_combine(send, layout, lse_base="e", out=torch.zeros(2, 2, 8, device=DEVICE))
    with pytest.raises(KernelContractError, match=r"^lse_out: got memory .* that overlaps recv"):
        unpack_combine(send, layout, lse_base="e", lse_out=layout.lse(send)[0])
    with pytest.raises(KernelContractError, match=r"^lse_base: got 'ln', expected 'e' or '2'"):
        unpack_combine(send, layout, lse_base="ln")  # type: ignore[call-overload]
    with pytest.raises(KernelContractError, match=r"^recv: got dtype torch.int8, expected torch.uint8"):
        unpack_combine(send.view(torch.int8), layout, lse_base="e")
    with pytest.raises(KernelContractError, match=r"^out: got memory .* that overlaps recv"):
        unpack_combine(send, layout, lse_base="e", out=layout.payload(send)[0])
    with pytest.raises(KernelContractError, match=r"^lse_out: got shape \[2, 4\], expected \[2, 2\]"):
        unpack_combine(send, layout, lse_base="e", lse_out=lse)
