"""A stage whose two agents talk over TCP between two network namespaces, with a hub between them that can be cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvxfer.control.auth import KeyPair
from kvxfer.control.peer_channel import new_keys
from kvxfer.ops.config import DecodeConfig, PrefillConfig, SecurityConfig, TransportConfig
from tests.faults import namespaces
from tests.faults.agent_child import run_agent
from tests.faults.forked import FaultError, Wire
from tests.faults.process_stage import START_S, Shape, Stage

_NUMBERS = {"pa": 1, "da0": 2}


class CutStage(Stage):
    """The process that makes it becomes the hub."""

    def __init__(self, shape: Shape) -> None:
        namespaces.enter_new()
        namespaces.begin_hub()
        super().__init__(shape)
        self._keys: dict[str, KeyPair] = {name: new_keys() for name in _NUMBERS}

    def _config(self, name: str, seat: Path) -> PrefillConfig | DecodeConfig:
        transport = self.shape.transport
        return msgspec.structs.replace(
            super()._config(name, seat),
            listen_host=namespaces.address(_NUMBERS[name]),
            transport=TransportConfig(name=transport, interface=namespaces.LINK if transport == "nixl" else ""),
            security=self._security(name),
        )

    def _security(self, name: str) -> SecurityConfig:
        """Both agents have a key; each admits the other's."""
        key_file, allowed_keys_file = (self.directory / f"{name}.{kind}" for kind in ("key", "allowed"))
        key_file.touch(mode=0o600)
        key_file.write_text(self._keys[name].secret + "\n", encoding="ascii")
        (other,) = _NUMBERS.keys() - {name}
        allowed_keys_file.write_text(self._keys[other].public + "\n", encoding="ascii")
        return SecurityConfig(key_file=str(key_file), allowed_keys_file=str(allowed_keys_file))

    def _program(self, name: str, seat: Path) -> Callable[[Wire], None]:
        if name not in _NUMBERS:
            return super()._program(name, seat)
        return partial(_run_apart, _NUMBERS[name], self._config(name, seat))

    def await_ready(self, name: str) -> None:
        if name in _NUMBERS:
            process = self.processes[name]
            process.take(lambda each: "apart" in each, START_S)
            namespaces.attach(_NUMBERS[name], process.pid)
            process.send({"attached": True})
        super().await_ready(name)


def _run_apart(number: int, config: PrefillConfig | DecodeConfig, wire: Wire) -> None:
    """An agent in a namespace of its own."""
    namespaces.enter_new()
    wire.send({"apart": True})
    if wire.receive() is None:
        raise FaultError("the stage is gone")
    namespaces.join(number)
    # Both agents live on one host, where UCX would find ways around the network.
    os.environ["UCX_TLS"] = "tcp,self"
    run_agent(config, wire)
