"""Where things lie in the buffers of the DCP all-to-all.

One peer's slot holds all payload rows, then all LSEs. Rows so keep their alignment and move in words of 16 bytes; LSEs
interleaved with the rows would break it.
"""

from dataclasses import dataclass

import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels._contract import FP8_DTYPES, PAYLOAD_DTYPES, check_contiguous, check_tensor
from kvxfer.kernels._launch import MAX_WORD_BYTES, ceil_div


@dataclass(frozen=True, slots=True)
class A2ALayout:
    """Where things lie in the buffers of one all-to-all: `world` slots, one a peer, each payload and then LSEs.

    `batch` rows of `heads` heads of `head_dim` elements of `dtype`; the heads are split evenly over `world` ranks.

    Raises:
        KernelContractError: a size below its least, heads that do not divide by `world`, or a foreign dtype.
    """

    world: int
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, got, least in (
            ("world", self.world, 1),
            ("batch", self.batch, 0),
            ("heads", self.heads, 1),
            ("head_dim", self.head_dim, 1),
        ):
            if got < least:
                raise KernelContractError(f"{name}: got {got}, expected at least {least}")
        if self.heads % self.world:
            raise KernelContractError(
                f"heads: got {self.heads}, expected a multiple of the {self.world} ranks that share them"
            )
        if self.dtype not in PAYLOAD_DTYPES:
            names = ", ".join(str(dtype) for dtype in PAYLOAD_DTYPES)
            raise KernelContractError(f"dtype: got {self.dtype}, expected one of {names}")

    @property
    def heads_per_rank(self) -> int:
        return self.heads // self.world

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the merged output: bf16 for an fp8 payload, else the payload's own."""
        return torch.bfloat16 if self.dtype in FP8_DTYPES else self.dtype

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        return self.batch * self.heads_per_rank * self.row_bytes

    @property
    def lse_offset_bytes(self) -> int:
        """Where the LSEs begin in a slot: after the payload, on a whole word."""
        return ceil_div(self.payload_bytes, MAX_WORD_BYTES) * MAX_WORD_BYTES

    @property
    def lse_bytes(self) -> int:
        return self.batch * self.heads_per_rank * 4

    @property
    def slot_bytes(self) -> int:
        """What one rank sends to one peer; a whole number of words, so that every slot begins on one."""
        return ceil_div(self.lse_offset_bytes + self.lse_bytes, MAX_WORD_BYTES) * MAX_WORD_BYTES

    @property
    def total_bytes(self) -> int:
        """The size of the send buffer, and of the receive buffer."""
        return self.world * self.slot_bytes

    def payload(self, buffer: torch.Tensor) -> torch.Tensor:
        """The payload in a uint8 buffer as `[world, batch, heads_per_rank, head_dim]` of `dtype`, a view."""
        rows = self._slots(buffer)[:, : self.payload_bytes].view(self.dtype)
        return rows.view(self.world, self.batch, self.heads_per_rank, self.head_dim)

    def lse(self, buffer: torch.Tensor) -> torch.Tensor:
        """The LSEs in a uint8 buffer as `[world, batch, heads_per_rank]` float32, a view."""
        end = self.lse_offset_bytes + self.lse_bytes
        lses = self._slots(buffer)[:, self.lse_offset_bytes : end].view(torch.float32)
        return lses.view(self.world, self.batch, self.heads_per_rank)

    def _slots(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[: self.total_bytes].view(self.world, self.slot_bytes)

    def check_buffer(self, name: str, buffer: torch.Tensor, device: torch.device | None = None) -> None:
        """Raises `KernelContractError` unless `buffer` is flat, contiguous, aligned uint8 of `total_bytes` or more."""
        check_tensor(name, buffer, shape=[None], dtypes=[torch.uint8], device=device)
        check_contiguous(name, buffer)
        if len(buffer) < self.total_bytes:
            raise KernelContractError(f"{name}: got {len(buffer)} bytes, expected at least {self.total_bytes}")
        if buffer.data_ptr() % MAX_WORD_BYTES:
            raise KernelContractError(
                f"{name}: got address {buffer.data_ptr():#x}, expected a multiple of {MAX_WORD_BYTES}"
            )
