"""A decode worker of the demo or bench: receives a sequence into its pool and compares every byte of it."""

from __future__ import annotations

import time

from kvxfer.cli import protocol
from kvxfer.cli.rows import expected_pool, first_difference
from kvxfer.cli.worker import WorkerPipe, run_worker
from kvxfer.control.client import DecodeClient, ReceivePages
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory


class DecodeWorker:
    """One pool, one agent."""

    def __init__(self, command: protocol.HandOver) -> None:
        """Create the pool and hand it over. `close` gives both back."""
        self.layout: PoolLayout = command.layout
        self.fill = command.fill
        self.memory = HostMemory.create(command.pool_bytes, "kvxfer-decode-pool")
        self.memory.array[:] = command.fill
        self._first_token = 0
        self.client = DecodeClient.connect(command.socket_dir, self.memory, command.layout)

    def opened(self) -> protocol.Reply:
        return protocol.Done()

    def perform(self, command: protocol.Command, _pipe: WorkerPipe) -> protocol.Reply:
        """Do what the parent asks."""
        match command:
            case protocol.Receive():
                return self._receive(command)
            case protocol.Refill():
                self.fill = command.fill
                self.memory.array[:] = command.fill
                return protocol.Done()
            case protocol.DecodeShared():
                # Only here: ranks that do not decode do without torch.
                from kvxfer.cli.demo_decode import decode_shared

                return decode_shared(command, self.memory, self.layout.groups[0], self._first_token)
            case protocol.Verify():
                image = expected_pool(self.layout, self.memory.num_bytes, self.fill, command.groups)
                return protocol.Verified(problem=first_difference(self.memory.array, image, self.layout))
            case _:
                return protocol.Failed(error=f"a decode worker cannot do {type(command).__name__}")

    def _receive(self, command: protocol.Receive) -> protocol.Ended:
        groups = {
            name: ReceivePages(pages.first_token, pages.end_token, pages.pages)
            for name, pages in command.groups.items()
        }
        start_s = time.monotonic()
        self.client.open(command.ticket, groups, deadline_s=command.deadline_s)
        event = self.client.wait(command.ticket, timeout_s=command.deadline_s + 5.0)
        if event.aux:
            self._first_token = int.from_bytes(event.aux[0], "little")
        return protocol.Ended(event=event, start_s=start_s, end_s=time.monotonic())

    def close(self) -> None:
        self.client.close()
        self.memory.close()


if __name__ == "__main__":
    run_worker(protocol.HandOver, DecodeWorker)
