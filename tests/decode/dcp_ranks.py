"""Runs a scenario on several ranks, one process each: over gloo on the CPU, or over NCCL on GPUs."""

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT_S = 90

# A fork server that has imported torch starts a rank in milliseconds, and is no fork of this process's threads.
# There is one for the whole test run, so it also imports what the ranks of the outside judge need.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "tests.decode.dcp_scenarios", "tests.deepseek_agents"])


def run_ranks(scenario: Callable[..., None], world: int, tmp_path: Path, *args: object, device: str = "cpu") -> None:
    """Runs `scenario(device, *args)` as every rank of a fresh process group; fails with a rank's own traceback."""
    store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
    ranks = []
    for rank in range(world):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_enter, args=(writer, scenario, rank, world, str(store), device, args))
        process.start()
        writer.close()
        ranks.append((rank, process, reader))
    failures = []
    try:
        for rank, _, reader in ranks:
            if not reader.poll(TIMEOUT_S):
                failures.append(f"rank {rank}: no answer within {TIMEOUT_S} s")
                break
            failure = _received(reader)
            if failure:
                failures.append(f"rank {rank}: {failure}")
    finally:
        for _, process, reader in ranks:
            if failures:
                process.kill()
            process.join()
            reader.close()
    assert not failures, "\n".join(failures)


def _received(reader: Connection) -> str:
    try:
        return str(reader.recv_bytes(), "utf-8")
    except EOFError:
        return "the process ended without a word"


def _enter(
    writer: Connection,
    scenario: Callable[..., None],
    rank: int,
    world: int,
    store: str,
    device: str,
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S - 10)  # a rank that hangs says where, before it is killed
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}  # no multicast over NVLink
    message = ""
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        scenario(torch.device(device), *args)
        # A rank that leaves while another is still connecting to it fails that one.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        message = traceback.format_exc()
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        writer.send_bytes(message.encode())
        writer.close()
