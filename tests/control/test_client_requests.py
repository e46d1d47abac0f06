"""What a worker gets wrong is told at its own call: argument, got and expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.control.client import ChunkPages, DecodeClient, PrefillClient, ReceivePages
from kvxfer.control.client_requests import open_request, reject_request, submit_request, ticket_request
from kvxfer.errors import ContractError
from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool
from tests.control.pools import layout

A = "a" * 32


def _submit(groups: Any, **fields: Any) -> object:  # noqa: ANN401
    return submit_request(A, groups, None, True, b"", fields.get("deadline_s", 60.0))


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: _submit([("kv", ChunkPages(0, 1, [0]))]), "groups: got list, expected a mapping .* to ChunkPages"),
        (lambda: _submit({"kv": (0, 1, [0])}), "group 'kv': got tuple, expected ChunkPages"),
        (lambda: _submit({"kv": ReceivePages(0, 1, [0])}), "group 'kv': got ReceivePages, expected ChunkPages"),
        (lambda: open_request(None, {}, 1.0), "ticket: got NoneType, expected a Ticket or its text"),  # type: ignore[arg-type]
        (lambda: reject_request(b"text"), "ticket: got bytes, expected a Ticket or its text"),  # type: ignore[arg-type]
        (lambda: ticket_request((), 1, 1e5), "deadline_s: got 100000.0, expected 0 to 86400 seconds"),
        (lambda: ticket_request((), 1, float("nan")), "deadline_s: got nan, expected 0 to 86400 seconds"),
        (lambda: _submit({}, deadline_s=None), "deadline_s: got None, expected a number of seconds"),
        (lambda: _submit({}, deadline_s="soon"), "deadline_s: got 'soon', expected a number of seconds"),
        (lambda: DevicePool.of(np.zeros(4)), "pool: got ndarray, expected a torch tensor on a GPU"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(ask: Callable[[], object], told: str) -> None:
    with pytest.raises(ContractError, match=f"^{told}"):
        ask()


@pytest.mark.parametrize("kind", [PrefillClient, DecodeClient])
def test_what_is_no_pool_or_layout_is_refused_before_anybody_is_asked(
    tmp_path: Path, kind: type[PrefillClient | DecodeClient]
) -> None:
    with pytest.raises(
        ContractError, match=r"^memory: got ndarray, expected a HostMemory, a MappedPool or a DevicePool"
    ):
        kind.connect(tmp_path, np.zeros(4), layout(), timeout_s=0.1)  # type: ignore[arg-type]
    with (
        HostMemory.create(4096, "pool") as memory,
        pytest.raises(ContractError, match=r"^layout: got dict, expected a PoolLayout"),
    ):
        kind.connect(tmp_path, memory, {}, timeout_s=0.1)  # type: ignore[arg-type]
