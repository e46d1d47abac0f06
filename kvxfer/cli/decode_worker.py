"""A decode worker of the demo or bench: receives a sequence into its pool and compares every byte of it."""

from __future__ import annotations

import time
from functools import partial

from kvxfer.cli import protocol
from kvxfer.cli.sending import ClientClock
from kvxfer.cli.worker import WorkerPipe, run_worker
from kvxfer.cli.worker_pool import CONNECT_S, HostPool, make_pool
from kvxfer.control.client import DecodeClient, ReceivePages
from kvxfer.layout import PoolLayout


class DecodeWorker:
    """One pool, one agent."""

    def __init__(self, command: protocol.HandOver) -> None:
        """Create the pool and hand it over. `close` gives both back."""
        self.layout: PoolLayout = command.layout
        self.fill = command.fill
        self.pool = make_pool(command)
        self._first_token = 0
        self.client = DecodeClient.connect(
            command.socket_dir, self.pool.handle, command.layout, placement=command.placement, timeout_s=CONNECT_S
        )

    def opened(self) -> protocol.Reply:
        return protocol.Done()

    def perform(self, command: protocol.Command, _pipe: WorkerPipe) -> protocol.Reply:
        """Do what the parent asks."""
        match command:
            case protocol.Open():
                return self._open(command)
            case protocol.AwaitEnd():
                return self._await_end(command)
            case protocol.Refill():
                self.fill = command.fill
                self.pool.fill(command.fill)
                return protocol.Done()
            case protocol.DecodeShared():
                # Only here: ranks that do not decode do without torch.
                from kvxfer.cli.demo_decode import decode_shared

                assert isinstance(self.pool, HostPool), "the model of the demo runs on the host"
                return decode_shared(command, self.pool.memory, self.layout.groups[0], self._first_token)
            case protocol.Verify():
                return protocol.Verified(problem=self.pool.problem(self.layout, self.fill, command.groups))
            case _:
                return protocol.Failed(error=f"a decode worker cannot do {type(command).__name__}")

    def _open(self, command: protocol.Open) -> protocol.Opened:
        groups = {
            name: ReceivePages(pages.first_token, pages.end_token, pages.pages)
            for name, pages in command.groups.items()
        }
        clock = ClientClock()
        start_s = time.monotonic()
        clock.call(partial(self.client.open, command.ticket, groups, deadline_s=command.deadline_s))
        return protocol.Opened(start_s=start_s, client_cpu_s=clock.cpu_s)

    def _await_end(self, command: protocol.AwaitEnd) -> protocol.Ended:
        clock = ClientClock()
        event = clock.call(partial(self.client.wait, command.ticket, timeout_s=command.timeout_s))
        if event.aux:
            self._first_token = int.from_bytes(event.aux[0], "little")
        return protocol.Ended(event=event, end_s=time.monotonic(), client_cpu_s=clock.cpu_s)

    def close(self) -> None:
        self.client.close()
        self.pool.close()


if __name__ == "__main__":
    run_worker(protocol.HandOver, DecodeWorker)
