"""How a prefill worker of the demo or bench submits a transfer, and what that costs its thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvxfer.cli.protocol import Computed, SendChunks, Sent
from kvxfer.control.client import ChunkPages, PrefillClient
from kvxfer.control.codec import decode_ticket
from kvxfer.control.messages import TransferEvent
from kvxfer.errors import ControlTimeoutError
from kvxfer.transfer import EventKind

if TYPE_CHECKING:
    from kvxfer.cli.products import Products

_Result = TypeVar("_Result")
_GRACE_S = 5.0


class ClientClock:
    """Processor time that this thread spends inside its client."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Call `function`, on the clock."""
        started_s = time.thread_time()
        try:
            return function()
        finally:
            self.cpu_s += time.thread_time() - started_s


class Sending:
    """One transfer. With `products` the worker computes meanwhile and looks at its client once a batch."""

    def __init__(self, client: PrefillClient, products: Products | None) -> None:
        self._client = client
        self._products = products
        self._clock = ClientClock()
        self._transfer = ""
        self._end: TransferEvent | None = None

    def run(self, command: SendChunks, device_bytes: Callable[[], int]) -> Sent:
        """Submit the chunks and wait for the end. Raises `KvxferError`."""
        ticket = decode_ticket(command.ticket)
        self._transfer = ticket.transfer
        if self._products is not None:
            self._products.run_up()
        first = self._products.last_done() if self._products is not None else None
        start_s = last_submit_s = time.monotonic()
        for number, chunk in enumerate(command.chunks):
            self._pass_time(start_s + number * command.interval_s)
            groups = {
                name: ChunkPages(pages.first_token, pages.end_token, pages.pages)
                for name, pages in chunk.groups.items()
            }
            submit = partial(
                self._client.submit,
                ticket,
                groups,
                last=chunk.last,
                aux=command.aux if chunk.last else b"",
                deadline_s=command.deadline_s,
            )
            last_submit_s = time.monotonic()
            self._clock.call(submit)
        event = self._await_end(time.monotonic() + command.deadline_s + _GRACE_S)
        end_s = time.monotonic()
        products_per_s = 0.0
        if self._products is not None and first is not None:
            products_per_s = self._products.rate_since(first)
            self._products.finish()
        return Sent(
            event=event,
            start_s=start_s,
            last_submit_s=last_submit_s,
            end_s=end_s,
            client_cpu_s=self._clock.cpu_s,
            products_per_s=products_per_s,
            device_bytes=device_bytes(),
        )

    def _pass_time(self, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0.0:
            self._turn(left_s)

    def _await_end(self, until_s: float) -> TransferEvent:
        while self._end is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                raise ControlTimeoutError("the transfer has no terminal event long after its deadline")
            self._turn(left_s)
        return self._end

    def _turn(self, timeout_s: float) -> None:
        """A batch of products and a look at the client, or, without products, a wait for it."""
        if self._products is not None:
            self._products.step()
            timeout_s = 0.0
        event = self._clock.call(partial(self._client.next_event, timeout_s))
        # Events of transfers before this one, given up by their deadlines, may still come.
        if event is not None and event.transfer == self._transfer and event.event is not EventKind.SOURCE_FREE:
            self._end = event


def compute_alone(products: Products, duration_s: float) -> Computed:
    """Compute for `duration_s` and nothing else."""
    products.run_up()
    first = products.last_done()
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s:
        products.step()
    rate_per_s = products.rate_since(first)
    products.finish()
    return Computed(products_per_s=rate_per_s)
