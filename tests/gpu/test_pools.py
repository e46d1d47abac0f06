"""Pools of a GPU that another process maps: by descriptor and by legacy handle."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from kvxfer.errors import HandoffError
from kvxfer.streams.device import DevicePool, PoolHandle, allocate_pool, map_pool, share_legacy
from tests.gpu.mapping_child import SEED
from tests.gpu.orders import MEMORY_BYTES, PEER, contents

pytestmark = pytest.mark.gpu(limit_s=40.0)
ROOT = Path(__file__).parents[2]


def packed(handles: list[PoolHandle]) -> str:
    return base64.b64encode(msgspec.json.encode(handles)).decode()


@pytest.mark.parametrize("reader", [0, 1])
def test_another_process_pulls_rows_from_both_kinds(reader: int) -> None:
    """On the same GPU, and on another that reaches it as a peer."""
    if reader >= torch.cuda.device_count():
        pytest.skip(f"needs {reader + 1} GPUs")
    bytes_of_pool = torch.from_numpy(contents(SEED)[PEER])
    shared = allocate_pool(MEMORY_BYTES, 0)
    tensor = shared.tensor()
    tensor.copy_(bytes_of_pool)
    # A pool in the midst of an allocation of torch: the handle is of the allocation, the offset finds the pool.
    whole = torch.zeros(2 * MEMORY_BYTES, dtype=torch.uint8, device="cuda")
    legacy = whole[4096 : 4096 + MEMORY_BYTES]
    legacy.copy_(bytes_of_pool)
    torch.cuda.synchronize()
    handle, fd = shared.handle, shared.fd
    legacy_handle = share_legacy(DevicePool.of(legacy))
    assert legacy_handle.offset_bytes >= 4096
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.mapping_child", packed([handle, legacy_handle]), str(fd), str(reader)],
        cwd=ROOT,
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
        text=True,
        timeout=35,
        check=True,
    )
    # Whether there are mappings without leave to write is the driver's affair.
    sys.stdout.write(result.stdout)
    assert result.stdout in ("pulled, is_read_only=True\n", "pulled, is_read_only=False\n")
    assert torch.equal(tensor.cpu(), bytes_of_pool)
    del tensor
    shared.close()


def test_what_cannot_be_mapped_is_refused_with_the_remedy() -> None:
    shared = allocate_pool(1000, 0)
    assert shared.pool.num_bytes == 1000
    handle, fd = shared.handle, shared.fd
    with pytest.raises(HandoffError, match="expected one of the GPUs that this process sees"):
        map_pool(msgspec.structs.replace(handle, gpu_uuid="00" * 16), fd)
    with pytest.raises(HandoffError, match="expected a part of"):
        map_pool(msgspec.structs.replace(handle, num_bytes=handle.mapped_bytes + 1), fd)
    with pytest.raises(HandoffError, match="cuMemImportFromShareableHandle"), Path(os.devnull).open() as no_pool:
        map_pool(handle, no_pool.fileno())
    with pytest.raises(HandoffError, match=r"without a legacy IPC handle.*allocate_pool"):
        share_legacy(shared.pool)
    mapped = map_pool(handle, fd)
    assert mapped.fd == -1, "what was mapped cannot be shared on"
    mapped.close()
    mapped.close()
    legacy = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    with pytest.raises(HandoffError, match=r"has the PID of this one.*shareProcessNamespace"):
        map_pool(share_legacy(DevicePool.of(legacy)))
    shared.close()
