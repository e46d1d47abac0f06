"""A prefill worker of the demo or bench: fills its pool, with a pattern or by running a model, and submits it."""

from __future__ import annotations

import time

from kvxfer.cli import protocol
from kvxfer.cli.rows import write_rows
from kvxfer.control.client import ChunkPages, PrefillClient
from kvxfer.control.codec import decode_ticket, encode_ticket
from kvxfer.errors import KvxferError
from kvxfer.memory import HostMemory


class PrefillWorker:
    """One pool, one agent."""

    def __init__(self, command: protocol.HandOver) -> None:
        """Create the pool and hand it over. `close` gives both back."""
        self.groups = {group.name: group for group in command.layout.groups}
        self.memory = HostMemory.create(command.pool_bytes, "kvxfer-prefill-pool")
        self.memory.array[:] = command.fill
        self.client = PrefillClient.connect(command.socket_dir, self.memory, command.layout)

    def opened(self) -> protocol.Reply:
        return protocol.Done()

    def perform(self, command: protocol.Command, pipe: protocol.WorkerPipe) -> protocol.Reply:
        """Do what the parent asks."""
        match command:
            case protocol.FillRows():
                write_rows(self.memory.array, self.groups[command.group], command.pages, command.rows)
                return protocol.Done()
            case protocol.Prefill():
                return self._prefill(command, pipe)
            case protocol.MakeTicket():
                return protocol.TicketText(text=encode_ticket(self.client.ticket(deadline_s=command.deadline_s)))
            case protocol.SendChunks():
                return self._send(command)
            case _:
                return protocol.Failed(error=f"a prefill worker cannot do {type(command).__name__}")

    def _prefill(self, command: protocol.Prefill, pipe: protocol.WorkerPipe) -> protocol.Reply:
        # Only here: torch takes seconds to import, and the bench does without it.
        try:
            from kvxfer.cli.demo_prefill import prefill_prompt
        except ModuleNotFoundError as error:
            raise KvxferError(
                f"the demo's model needs {error.name}, which is not installed: pip install torch"
            ) from error
        return prefill_prompt(command, self.memory, self.groups, pipe)

    def _send(self, command: protocol.SendChunks) -> protocol.Ended:
        ticket = decode_ticket(command.ticket)
        start_s = time.monotonic()
        for chunk in command.chunks:
            groups = {
                name: ChunkPages(pages.first_token, pages.end_token, pages.pages)
                for name, pages in chunk.groups.items()
            }
            aux = command.aux if chunk.last else b""
            self.client.submit(ticket, groups, last=chunk.last, aux=aux, deadline_s=command.deadline_s)
        event = self.client.wait(ticket, timeout_s=command.deadline_s + 5.0)
        return protocol.Ended(event=event, start_s=start_s, end_s=time.monotonic())

    def close(self) -> None:
        self.client.close()
        self.memory.close()


if __name__ == "__main__":
    protocol.run_worker(protocol.HandOver, PrefillWorker)
