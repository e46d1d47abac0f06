"""A prefill worker of the demo or bench: fills its pool, with a pattern or by running a model, and submits it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvxfer.cli import protocol
from kvxfer.cli.rows import write_rows
from kvxfer.cli.worker import WorkerPipe, run_worker
from kvxfer.control.client import ChunkPages, PrefillClient
from kvxfer.control.codec import decode_ticket, encode_ticket
from kvxfer.errors import KvxferError
from kvxfer.memory import HostMemory

if TYPE_CHECKING:
    from kvxfer.cli.demo_model import MlaModel


class PrefillWorker:
    """One pool, one agent."""

    def __init__(self, command: protocol.HandOver) -> None:
        """Create the pool and hand it over. `close` gives both back."""
        self.groups = {group.name: group for group in command.layout.groups}
        self.memory = HostMemory.create(command.pool_bytes, "kvxfer-prefill-pool")
        self.memory.array[:] = command.fill
        self._decoding: tuple[MlaModel, list[int], int] | None = None  # model, pages, first token: set by prefill
        self.client = PrefillClient.connect(command.socket_dir, self.memory, command.layout)

    def opened(self) -> protocol.Reply:
        return protocol.Done()

    def perform(self, command: protocol.Command, pipe: WorkerPipe) -> protocol.Reply:
        """Do what the parent asks."""
        match command:
            case protocol.FillRows():
                write_rows(self.memory.array, self.groups[command.group], command.pages, command.rows)
                return protocol.Done()
            case protocol.Prefill():
                return self._prefill(command, pipe)
            case protocol.DecodeAlone():
                return self._decode(command)
            case protocol.MakeTicket():
                return protocol.TicketText(text=encode_ticket(self.client.ticket(deadline_s=command.deadline_s)))
            case protocol.SendChunks():
                return self._send(command)
            case _:
                return protocol.Failed(error=f"a prefill worker cannot do {type(command).__name__}")

    def _prefill(self, command: protocol.Prefill, pipe: WorkerPipe) -> protocol.Reply:
        # Only here: torch takes seconds to import, and the bench does without it.
        try:
            from kvxfer.cli.demo_prefill import prefill_prompt
        except ModuleNotFoundError as error:
            raise KvxferError(f"the model needs {error.name}, which is not installed: pip install torch") from error
        prefilled, model = prefill_prompt(command, self.memory, self.groups, pipe)
        self._decoding = (model, command.pages, prefilled.first_token)
        return prefilled

    def _decode(self, command: protocol.DecodeAlone) -> protocol.Reply:
        from kvxfer.cli.demo_decode import decode_alone
        from kvxfer.cli.paged_rows import PagedRows

        assert self._decoding is not None
        model, pages, first_token = self._decoding
        cache = PagedRows(self.memory, self.groups["kv"], pages)
        return decode_alone(model, cache, first_token, command.num_tokens, command.num_steps)

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
    run_worker(protocol.HandOver, PrefillWorker)
