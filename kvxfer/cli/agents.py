"""`kvxfer prefill` and `kvxfer decode`: run one agent until a signal asks it to end."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import msgspec

from kvxfer.cli.output import report_error
from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.ops.config import DecodeConfig, PrefillConfig, load_decode_config, load_prefill_config
from kvxfer.ops.logs import set_up_logging
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.transports import exit_process

_Config = TypeVar("_Config", PrefillConfig, DecodeConfig)
_Agent = PrefillAgent | DecodeAgent
_log = logging.getLogger("kvxfer.cli")
_KEYS = {
    "key_file": "security.key_file",
    "allowed_keys_file": "security.allowed_keys_file",
    "host": "listen_host",
    "port": "listen_port",
}
"""Keys of the file, by the shorter names that the parts of an agent call them."""


def run_prefill(config_path: Path, as_json: bool) -> NoReturn:
    """Run a prefill agent; ends the process."""
    _run(config_path, load_prefill_config, PrefillAgent, as_json)


def run_decode(config_path: Path, as_json: bool) -> NoReturn:
    """Run a decode agent; ends the process."""
    _run(config_path, load_decode_config, DecodeAgent, as_json)


def _run(path: Path, load: Callable[[Path], _Config], create: Callable[[_Config], _Agent], as_json: bool) -> NoReturn:
    agents: list[_Agent] = []

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if not agents:
            exit_process(0)  # still starting: nothing is shared with anybody yet
        agents[0].stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        config = load(path)
        set_up_logging(config.log_level)
        agents.append(_create(path, config, create))
        threading.excepthook = partial(_lose_thread, agents[0])
        gc.freeze()  # what exists by now stays: to look through it all again and again would hold up the loop
        _say_ready(agents[0], config, as_json)
        agents[0].run()
    except KvxferError as error:
        code = report_error(error)
    else:
        code = 0
    for agent in agents:
        agent.close()
    # An engine's native libraries may crash after Python's end: a supervisor must not see that as a failure.
    exit_process(code)


def _lose_thread(agent: _Agent, ended: threading.ExceptHookArgs) -> None:
    """A thread has ended by an error that nothing handles: the agent cannot go on as it should, and says so."""
    name = ended.thread.name if ended.thread is not None else "a thread"
    assert ended.exc_value is not None
    agent.ops.lost_thread(f"thread {name} has ended by an error: {ended.exc_type.__name__}")
    _log.error("thread %s has ended by an error: restart this agent", name, exc_info=ended.exc_value)


def _create(path: Path, config: _Config, create: Callable[[_Config], _Agent]) -> _Agent:
    """The agent. What it finds wrong with its configuration names the file and the whole key, as the loader does."""
    try:
        return create(config)
    except ConfigError as error:
        name, colon, rest = str(error).partition(": ")
        raise ConfigError(f"{path}: {_KEYS.get(name, name)}{colon}{rest}") from error


def _say_ready(agent: _Agent, config: PrefillConfig | DecodeConfig, as_json: bool) -> None:
    role = "prefill" if isinstance(config, PrefillConfig) else "decode"
    # A decode agent listens nowhere.
    endpoint = {"endpoint": agent.endpoint} if isinstance(agent, PrefillAgent) else {}
    facts = {
        "ready": True,
        "role": role,
        **endpoint,
        "incarnation": agent.incarnation,
        "public_key": agent.public_key,
        "socket_dir": config.socket_dir,
        "transport": config.transport.name,
        **({"ops": agent.ops.endpoint} if agent.ops.endpoint else {}),
    }
    line = msgspec.json.encode(facts).decode()
    if not as_json:
        pages = f", health and metrics at http://{agent.ops.endpoint}" if agent.ops.endpoint else ""
        at = "".join(f" at {address}" for address in endpoint.values())
        line = (
            f"{role} agent ready{at}, worker sockets in {config.socket_dir}, "
            f"transport {config.transport.name}{pages}; end it with SIGTERM or Ctrl-C"
        )
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
