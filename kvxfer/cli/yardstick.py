"""One end of the yardstick of `kvxfer bench transfer`: the engine alone, writing one contiguous block."""

from __future__ import annotations

import select
import time

import numpy as np

from kvxfer.cli import protocol
from kvxfer.cli.worker import WorkerPipe, run_worker
from kvxfer.control.ids import new_id
from kvxfer.errors import ControlTimeoutError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.transports import Outcome, Region, RegionDescriptor, WriteBatch, create_transport, exit_process

_WRITE_TIMEOUT_S = 120.0


class EngineWorker:
    """A transport and one registered region; writes to another one's region, or only lies there to be written to."""

    def __init__(self, command: protocol.OpenEngine) -> None:
        """Allocate, touch and register. `close` gives all back."""
        self.peer = new_id()
        self.memory = HostMemory.create(command.num_bytes, "kvxfer-yardstick")
        self.memory.array[:] = command.fill
        self.transport = create_transport(command.transport, incarnation=self.peer)
        self.descriptor = self.transport.register(Region(self.memory.address, self.memory.num_bytes, fd=self.memory.fd))
        self._known_peers: set[str] = set()

    def opened(self) -> protocol.Reply:
        return protocol.EngineOpen(
            peer=self.peer,
            metadata=self.transport.metadata(),
            region_id=self.descriptor.region_id,
            num_bytes=self.descriptor.num_bytes,
        )

    def perform(self, command: protocol.Command, _pipe: WorkerPipe) -> protocol.Reply:
        """Do what the parent asks."""
        match command:
            case protocol.WriteOnce():
                return self._write(command.target)
            case protocol.CheckFill():
                num_wrong = int(np.count_nonzero(self.memory.array != command.fill))
                return protocol.Verified(problem=f"{num_wrong} bytes of the yardstick differ" if num_wrong else "")
            case _:
                return protocol.Failed(error=f"a yardstick process cannot do {type(command).__name__}")

    def _write(self, target: protocol.EngineOpen) -> protocol.Written:
        if target.peer not in self._known_peers:
            self.transport.add_peer(target.peer, target.metadata)
            self._known_peers.add(target.peer)
        batch = WriteBatch(
            RegionDescriptor(target.region_id, target.num_bytes),
            np.array([self.memory.address], dtype=np.uint64),
            np.array([0], dtype=np.uint64),
            np.array([self.memory.num_bytes], dtype=np.uint64),
        )
        start_s = time.monotonic()
        self.transport.submit_write(target.peer, batch)
        while not (completions := self.transport.poll()):
            if time.monotonic() - start_s > _WRITE_TIMEOUT_S:
                raise ControlTimeoutError(f"yardstick: the write did not end within {_WRITE_TIMEOUT_S:.0f} s")
            select.select([self.transport.fileno()], [], [], 1.0)
        elapsed_s = time.monotonic() - start_s
        if completions[0].outcome is not Outcome.DONE:
            raise TransportError(
                f"yardstick: the write ended as {completions[0].outcome.value}: {completions[0].detail}"
            )
        return protocol.Written(elapsed_s=elapsed_s, path=self.transport.path(target.peer))

    def close(self) -> None:
        self.transport.close()
        self.memory.close()


if __name__ == "__main__":
    run_worker(protocol.OpenEngine, EngineWorker)
    exit_process(0)
