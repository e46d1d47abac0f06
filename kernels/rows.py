"""Copying rows between strided tables, all layers in one launch.

A table is `layers` base addresses and a row stride: row `r` of layer `l` lies at `layer_ptrs[l] + r * row_stride`.
The bytes of one layer's rows, laid end to end, are cut into tiles; a program copies tile after tile (grid stride), so
any number of layers and rows fits one launch. Words are as wide as row size, strides and the layer's two base
addresses allow. The addresses live on the device, so the kernel itself picks the width for each layer.
"""
# mypy: no-check-untyped-defs, disable-error-code="no-untyped-def, untyped-decorator"

import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels import reference
from kvxfer.kernels._contract import check_contiguous, check_tensor
from kvxfer.kernels._launch import MAX_GRID, ceil_div, jit, runs_triton, tl, widest_word_bytes

# Words in flight for one program, and its warps: 4 words of 16 bytes a thread.
_BLOCK_WORDS = 256
_NUM_WARPS = 2


@jit
def _copy_words(
    src_address, dst_address, src_rows, dst_rows, first_byte, num_rows, src_row_stride, dst_row_stride,
    ROW_BYTES: tl.constexpr, TILE_BYTES: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Copies the bytes `[first_byte, first_byte + TILE_BYTES)` of a layer's rows in words of `WORD` bytes."""
    # A word of 16 bytes is two lanes of 8 that lie side by side: the compiler joins them into one access.
    LANES: tl.constexpr = 2 if WORD == 16 else 1
    ROW_WORDS: tl.constexpr = ROW_BYTES // WORD
    if WORD >= 8:
        lane_type = tl.int64
    elif WORD == 4:
        lane_type = tl.int32
    elif WORD == 2:
        lane_type = tl.int16
    else:
        lane_type = tl.int8
    src = tl.multiple_of(src_address.to(tl.pointer_type(lane_type)), WORD)
    dst = tl.multiple_of(dst_address.to(tl.pointer_type(lane_type)), WORD)
    lanes = tl.arange(0, LANES)[None, :]
    for tile_word in range(0, TILE_BYTES // WORD, BLOCK):
        first_word = first_byte // WORD + tile_word
        first_row = first_word // ROW_WORDS
        # 32-bit arithmetic inside a tile, 64-bit for its place.
        words = (first_word - first_row * ROW_WORDS).to(tl.int32) + tl.arange(0, BLOCK)
        rows = words // ROW_WORDS
        cols = words - rows * ROW_WORDS
        rows = first_row + rows
        inside = rows < num_rows
        from_rows = tl.load(src_rows + rows, mask=inside, other=0)
        from_words = from_rows * (src_row_stride // WORD) + cols
        values = tl.load(src + (from_words[:, None] * LANES + lanes), mask=inside[:, None])
        if DENSE:
            to_words = first_word + tl.arange(0, BLOCK)
        else:
            to_rows = tl.load(dst_rows + rows, mask=inside, other=0)
            to_words = to_rows * (dst_row_stride // WORD) + cols
        tl.store(dst + (to_words[:, None] * LANES + lanes), values, mask=inside[:, None])


# No specialisation on counts, strides and addresses: one compiled kernel for each row size and width.
_UNSPECIALISED = ["dense_address", "num_rows", "tiles_per_layer", "num_tiles", "src_row_stride", "dst_row_stride"]


@jit(do_not_specialize=_UNSPECIALISED)
def _copy_rows_kernel(
    src_layer_ptrs, src_rows, dst_layer_ptrs, dst_rows,
    dense_address, num_rows, tiles_per_layer, num_tiles, src_row_stride, dst_row_stride,
    ROW_BYTES: tl.constexpr, TILE_BYTES: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    for item in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        layer = item // tiles_per_layer
        first_byte = (item - layer * tiles_per_layer).to(tl.int64) * TILE_BYTES
        src_address = tl.load(src_layer_ptrs + layer)
        if DENSE:
            dst_address = dense_address + layer.to(tl.int64) * num_rows * ROW_BYTES
        else:
            dst_address = tl.load(dst_layer_ptrs + layer)
        # The lowest set bit is the widest word that both addresses, the row size and the strides allow.
        alignment = src_address | dst_address | WORD
        alignment = alignment & -alignment
        for shift in tl.static_range(5):
            if (1 << shift) <= WORD:  # noqa: SIM102 - the outer test is made at compile time
                if alignment == (1 << shift):
                    _copy_words(
                        src_address, dst_address, src_rows, dst_rows, first_byte, num_rows, src_row_stride,
                        dst_row_stride, ROW_BYTES, TILE_BYTES, BLOCK, 1 << shift, DENSE,
                    )  # fmt: skip


def copy_rows(
    src_layer_ptrs: torch.Tensor,
    src_rows: torch.Tensor,
    dst_layer_ptrs: torch.Tensor,
    dst_rows: torch.Tensor,
    row_bytes: int,
    src_row_stride: int,
    dst_row_stride: int,
    *,
    max_ctas: int | None = None,
) -> None:
    """Copies row `src_rows[i]` of every layer to row `dst_rows[i]` of the same layer of another table.

    `src_layer_ptrs`, `dst_layer_ptrs`: `[num_layers]` int64, base addresses. `src_rows`, `dst_rows`: `[num_rows]`
    int64. All contiguous, on one device; with CUDA the addresses may be of device or pinned host memory. `row_bytes`
    and the two strides are in bytes, of any value and alignment. The caller answers for addresses and row numbers:
    they are not checked, and source and destination rows must not overlap. `max_ctas` bounds the programs of the
    launch (default: one per tile), so that the copy leaves multiprocessors to others.

    Raises:
        KernelContractError: shape, dtype, device or sizes outside this contract.
    """
    num_layers = _check_table("src_layer_ptrs", src_layer_ptrs, "src_rows", src_rows)
    check_tensor("dst_layer_ptrs", dst_layer_ptrs, shape=[num_layers], dtypes=[torch.int64], device=src_rows.device)
    check_tensor("dst_rows", dst_rows, shape=[len(src_rows)], dtypes=[torch.int64], device=src_rows.device)
    check_contiguous("dst_layer_ptrs", dst_layer_ptrs)
    check_contiguous("dst_rows", dst_rows)
    _check_sizes(row_bytes, max_ctas, src_row_stride=src_row_stride, dst_row_stride=dst_row_stride)
    if num_layers == 0 or len(src_rows) == 0:
        return
    if not runs_triton(src_rows):
        reference.copy_rows(
            src_layer_ptrs, src_rows, dst_layer_ptrs, dst_rows, row_bytes, src_row_stride, dst_row_stride
        )
        return
    _launch(src_layer_ptrs, src_rows, dst_layer_ptrs, dst_rows, 0, row_bytes, src_row_stride, dst_row_stride, max_ctas)


def gather_rows(
    layer_ptrs: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    row_bytes: int,
    row_stride: int,
    *,
    max_ctas: int | None = None,
) -> None:
    """Gathers row `rows[i]` of every layer into `out`, dense and layer-major: the case that fills a slot.

    `layer_ptrs`: `[num_layers]` int64 base addresses. `rows`: `[num_rows]` int64. `out`: `[num_layers * num_rows *
    row_bytes]` uint8 or more, contiguous, of any alignment, on the device of `rows` or in pinned host memory.
    `row_bytes` and `row_stride` in bytes. Addresses, row numbers and `max_ctas` as in `copy_rows`.

    Raises:
        KernelContractError: shape, dtype, device or sizes outside this contract.
    """
    num_layers = _check_table("layer_ptrs", layer_ptrs, "rows", rows)
    check_tensor("out", out, shape=[None], dtypes=[torch.uint8])
    check_contiguous("out", out)
    on_host = out.device.type == "cpu" and rows.is_cuda and out.is_pinned()
    if out.device != rows.device and not on_host:
        raise KernelContractError(f"out: got device {out.device}, expected {rows.device} or pinned host memory")
    _check_sizes(row_bytes, max_ctas, row_stride=row_stride)
    needed_bytes = num_layers * len(rows) * row_bytes
    if len(out) < needed_bytes:
        raise KernelContractError(f"out: got {len(out)} bytes, expected at least {needed_bytes} for these rows")
    if needed_bytes == 0:
        return
    if not runs_triton(rows):
        reference.gather_rows(layer_ptrs, rows, out, row_bytes, row_stride)
        return
    _launch(layer_ptrs, rows, layer_ptrs, rows, out.data_ptr(), row_bytes, row_stride, row_bytes, max_ctas)


def _launch(
    src_layer_ptrs: torch.Tensor,
    src_rows: torch.Tensor,
    dst_layer_ptrs: torch.Tensor,
    dst_rows: torch.Tensor,
    dense_address: int,
    row_bytes: int,
    src_row_stride: int,
    dst_row_stride: int,
    max_ctas: int | None,
) -> None:
    """One launch; a `dense_address` other than 0 takes the place of the destination table."""
    word_bytes = widest_word_bytes(row_bytes, src_row_stride, dst_row_stride, dense_address)
    tile_bytes = _BLOCK_WORDS * word_bytes
    tiles_per_layer = ceil_div(len(src_rows) * row_bytes, tile_bytes)
    num_tiles = len(src_layer_ptrs) * tiles_per_layer
    _copy_rows_kernel[(min(num_tiles, max_ctas or MAX_GRID),)](
        src_layer_ptrs,
        src_rows,
        dst_layer_ptrs,
        dst_rows,
        dense_address,
        len(src_rows),
        tiles_per_layer,
        num_tiles,
        src_row_stride,
        dst_row_stride,
        ROW_BYTES=row_bytes,
        TILE_BYTES=tile_bytes,
        BLOCK=_BLOCK_WORDS,
        WORD=word_bytes,
        DENSE=dense_address != 0,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def _check_table(ptrs_name: str, layer_ptrs: torch.Tensor, rows_name: str, rows: torch.Tensor) -> int:
    check_tensor(rows_name, rows, shape=[None], dtypes=[torch.int64])
    check_tensor(ptrs_name, layer_ptrs, shape=[None], dtypes=[torch.int64], device=rows.device)
    check_contiguous(rows_name, rows)
    check_contiguous(ptrs_name, layer_ptrs)
    return len(layer_ptrs)


def _check_sizes(row_bytes: int, max_ctas: int | None, **strides: int) -> None:
    if row_bytes < 1:
        raise KernelContractError(f"row_bytes: got {row_bytes}, expected at least 1")
    for name, stride in strides.items():
        if stride < row_bytes:
            raise KernelContractError(f"{name}: got {stride}, expected at least row_bytes = {row_bytes}")
    if max_ctas is not None and max_ctas < 1:
        raise KernelContractError(f"max_ctas: got {max_ctas}, expected at least 1 or None")
