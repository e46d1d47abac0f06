"""Contract checks of the kernel wrappers: each names the argument, what was got and what was expected."""

from collections.abc import Sequence
from typing import Literal

import torch

from kvxfer.errors import KernelContractError

# The base of the logarithm in a log-sum-exp: an attention kernel that works in exp2 hands out base "2".
LseBase = Literal["e", "2"]
INT_DTYPES = (torch.int32, torch.int64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PAYLOAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)


def check_lse_base(lse_base: object) -> None:
    if lse_base not in ("e", "2"):
        raise KernelContractError(
            f"lse_base: got {lse_base!r}, expected 'e' or '2': the base that the attention kernel's LSE is in"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Raises `KernelContractError` unless `tensor` has the shape (None: any size), a dtype and the device."""
    if not isinstance(tensor, torch.Tensor):
        raise KernelContractError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    fits = tensor.dim() == len(shape) and all(
        want is None or got == want for got, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise KernelContractError(f"{name}: got shape {list(tensor.shape)}, expected {expected}")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise KernelContractError(f"{name}: got dtype {tensor.dtype}, expected {names}")
    if device is not None and tensor.device != device:
        raise KernelContractError(f"{name}: got device {tensor.device}, expected {device} as the other arguments")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise KernelContractError(
            f"{name}: got strides {tensor.stride()} for shape {list(tensor.shape)}, expected a contiguous tensor"
        )


def check_written(name: str, tensor: torch.Tensor) -> None:
    """Raises unless every element of a tensor that a kernel writes has an address of its own."""
    end = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < end:
            raise KernelContractError(
                f"{name}: got strides {tensor.stride()} for shape {list(tensor.shape)}, "
                "expected a tensor whose elements do not share memory: it is written"
            )
        end = stride * (size - 1) + end


def check_apart(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises if the byte ranges of two tensors overlap: one is read while the other is written."""
    first, last = _byte_range(tensor)
    other_first, other_last = _byte_range(other)
    if first < other_last and other_first < last:
        raise KernelContractError(
            f"{name}: got memory [{first:#x}, {last:#x}) that overlaps {other_name} [{other_first:#x}, "
            f"{other_last:#x}), expected memory of its own"
        )


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
