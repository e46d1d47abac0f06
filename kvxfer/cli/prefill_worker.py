"""A prefill worker of the demo or bench: fills its pool, with a pattern or by running a model, and submits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.cli import protocol
from kvxfer.cli.sending import Sending, compute_alone
from kvxfer.cli.worker import WorkerPipe, run_worker
from kvxfer.cli.worker_pool import CONNECT_S, HostPool, make_pool
from kvxfer.control.client import PrefillClient
from kvxfer.control.codec import encode_ticket
from kvxfer.errors import KvxferError
from kvxfer.memory import HostMemory

if TYPE_CHECKING:
    from kvxfer.cli.demo_model import MlaModel
    from kvxfer.cli.products import Products


class PrefillWorker:
    """One pool, one agent."""

    def __init__(self, command: protocol.HandOver) -> None:
        """Create the pool and hand it over. `close` gives both back."""
        self.groups = {group.name: group for group in command.layout.groups}
        self.pool = make_pool(command)
        self._products: dict[protocol.Busy, Products] = {}
        self._decoding: tuple[MlaModel, list[int], int] | None = None  # model, pages, first token: set by prefill
        self.client = PrefillClient.connect(
            command.socket_dir, self.pool.handle, command.layout, placement=command.placement, timeout_s=CONNECT_S
        )

    def opened(self) -> protocol.Reply:
        return protocol.Done()

    def perform(self, command: protocol.Command, pipe: WorkerPipe) -> protocol.Reply:
        """Do what the parent asks."""
        match command:
            case protocol.FillRows():
                self.pool.write(self.groups[command.group], command.pages, command.rows)
                return protocol.Done()
            case protocol.Prefill():
                return self._prefill(command, pipe)
            case protocol.DecodeAlone():
                return self._decode(command)
            case protocol.MakeTicket():
                return protocol.TicketText(text=encode_ticket(self.client.ticket(deadline_s=command.deadline_s)))
            case protocol.SendChunks():
                return Sending(self.client, self._products_of(command.busy)).run(command, self.pool.device_bytes)
            case protocol.Compute():
                products = self._products_of(command.busy)
                assert products is not None, command
                return compute_alone(products, command.duration_s)
            case protocol.CopyAcross():
                return self._copy_across(command)
            case _:
                return protocol.Failed(error=f"a prefill worker cannot do {type(command).__name__}")

    def _prefill(self, command: protocol.Prefill, pipe: WorkerPipe) -> protocol.Reply:
        # Only here: torch takes seconds to import, and the bench does without it.
        try:
            from kvxfer.cli.demo_prefill import prefill_prompt
        except ModuleNotFoundError as error:
            raise KvxferError(f"the model needs {error.name}, which is not installed: pip install torch") from error
        prefilled, model = prefill_prompt(command, self._host_memory(), self.groups, pipe)
        self._decoding = (model, command.pages, prefilled.first_token)
        return prefilled

    def _decode(self, command: protocol.DecodeAlone) -> protocol.Reply:
        from kvxfer.cli.demo_decode import decode_alone
        from kvxfer.cli.paged_rows import PagedRows

        assert self._decoding is not None
        model, pages, first_token = self._decoding
        cache = PagedRows(self._host_memory(), self.groups["kv"], pages)
        return decode_alone(model, cache, first_token, command.num_tokens, command.num_steps)

    def _products_of(self, busy: protocol.Busy) -> Products | None:
        if busy == "none":
            return None
        # Only here: it needs torch and a GPU.
        from kvxfer.cli.products import Products

        if busy not in self._products:
            self._products[busy] = Products(busy)
        return self._products[busy]

    def _copy_across(self, command: protocol.CopyAcross) -> protocol.Copied:
        # Only here, as above.
        from kvxfer.cli.torch_pool import TorchPool

        assert isinstance(self.pool, TorchPool), "only pools of GPUs are copied to others"
        return protocol.Copied(elapsed_s=self.pool.copy_across(command.num_bytes, command.dst_device_index))

    def _host_memory(self) -> HostMemory:
        assert isinstance(self.pool, HostPool), "the model of the demo runs on the host"
        return self.pool.memory

    def close(self) -> None:
        self.client.close()
        self.pool.close()


if __name__ == "__main__":
    run_worker(protocol.HandOver, PrefillWorker)
