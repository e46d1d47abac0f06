"""Configuration of the agents: TOML files and what may stand in them.

Every key names its unit. A wrong file raises `ConfigError` with file, key, got and expected; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvxfer.errors import ConfigError
from kvxfer.tables import read_table

MAX_SOCKET_PATH_BYTES = 107
"""What fits into `sockaddr_un.sun_path` with its closing zero."""
MAX_SOCKET_NAME_BYTES = len("control.sock")
"""The longest file name that an agent makes in its `socket_dir`."""

TransportName = Literal["nixl", "mooncake", "loopback"]
TransferMode = Literal["auto", "packed", "raw", "p2p", "serial"]
Verify = Literal["off", "full"]
SlotKind = Literal["pinned_host", "device"]
LogLevel = Literal["debug", "info", "warning", "error"]
OptionValue = str | int | float | bool

_Positive = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Threads = Annotated[int, msgspec.Meta(ge=1, le=256)]
_GpuIndex = Annotated[int, msgspec.Meta(ge=0, le=1023)]
_GpuUuid = Annotated[str, msgspec.Meta(pattern="^(GPU-)?[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}$")]
_Filled = Annotated[str, msgspec.Meta(min_length=1)]


class SlotConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of one agent: `num_slots` pieces of `slot_bytes` bytes each, registered with the engine at the start.

    They lie in host memory, which GPU workers pin, or, with `kind = "device"`, on the GPU that this process knows
    under the index, or UUID, `gpu`.
    """

    kind: SlotKind = "pinned_host"
    gpu: _GpuIndex | _GpuUuid = 0
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 8
    slot_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 40)] = 8 << 20


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine moves the slots. `interface` is the network interface it shall use, empty for its own choice.

    `options` go to the adapter of that engine as they are; see docs/configuration.md.
    """

    name: TransportName = "nixl"
    interface: str = ""
    options: dict[str, OptionValue] = {}


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of one agent, see docs/security.md. `key_file` has its secret key (`kvxfer keygen`); empty: a fresh one for
    each run. `allowed_keys_file` lists the public keys of the agents that it talks to; empty: all, where a prefill
    agent listens on a loopback address.
    """

    key_file: str = ""
    allowed_keys_file: str = ""


class OpsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where one agent serves health, readiness and metrics over HTTP: at `listen_host:listen_port` (port 0: any free
    one), nowhere with an empty `listen_host`. A wildcard address needs `allow_wildcard`. With a `trace_file` it notes
    there when its operations began and ended (`ops.tracing`).
    """

    listen_host: str = ""
    listen_port: _Port = 0
    allow_wildcard: bool = False
    trace_file: str = ""


class PrefillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill agent.

    `socket_dir` is the directory of the sockets to its worker. Decode agents reach it at `listen_host:listen_port`
    (port 0: any free one); tickets name `advertise_host` instead of `listen_host` where it is set. A peer that gives
    no sign of life for `peer_timeout_s` seconds is gone. Told to stop, it takes on nothing new and gives what is open
    `drain_s` seconds to end.
    """

    socket_dir: _Filled
    listen_host: _Filled = "127.0.0.1"
    listen_port: _Port = 0
    advertise_host: str = ""
    security: SecurityConfig = SecurityConfig()
    transport: TransportConfig = TransportConfig()
    slots: SlotConfig = SlotConfig()
    ops: OpsConfig = OpsConfig()
    mode: TransferMode = "auto"
    num_threads: _Threads = 2
    peer_timeout_s: _Positive = 5.0
    drain_s: _Seconds = 5.0
    log_level: LogLevel = "info"


class DecodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decode agent: number `dst_rank` of the `dst_world` agents of its decode group.

    `listen_host` is the address at which its engine is reached; the agent itself listens nowhere. `credits_per_leg` is
    how many landing slots one leg may hold at a time. With `verify = "full"` every packed segment comes with a checksum
    that is checked before its rows go into pages. The rest as in `PrefillConfig`.
    """

    socket_dir: _Filled
    listen_host: _Filled = "127.0.0.1"
    dst_rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0
    dst_world: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    security: SecurityConfig = SecurityConfig()
    transport: TransportConfig = TransportConfig()
    slots: SlotConfig = SlotConfig()
    ops: OpsConfig = OpsConfig()
    credits_per_leg: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 4
    verify: Verify = "off"
    num_threads: _Threads = 2
    peer_timeout_s: _Positive = 5.0
    drain_s: _Seconds = 5.0
    log_level: LogLevel = "info"


_Config = TypeVar("_Config", PrefillConfig, DecodeConfig)


def load_prefill_config(path: str | os.PathLike[str]) -> PrefillConfig:
    """Read and check the configuration file of a prefill agent. Raises `ConfigError`."""
    config = _load(Path(path), PrefillConfig)
    wildcard = _is_wildcard(config.listen_host)
    if wildcard and not config.advertise_host:
        raise ConfigError(
            f"{path}: advertise_host: got nothing, expected the address that peers shall use, "
            f"because listen_host {config.listen_host!r} names none"
        )
    if _is_wildcard(config.advertise_host):
        raise ConfigError(f"{path}: advertise_host: got {config.advertise_host!r}, expected one address or host name")
    return config


def load_decode_config(path: str | os.PathLike[str]) -> DecodeConfig:
    """Read and check the configuration file of a decode agent. Raises `ConfigError`."""
    config = _load(Path(path), DecodeConfig)
    if config.dst_rank >= config.dst_world:
        raise ConfigError(f"{path}: dst_rank: got {config.dst_rank}, expected below dst_world {config.dst_world}")
    return config


def dump_config(config: PrefillConfig | DecodeConfig) -> str:
    """`config` as the text of a TOML file that the loaders read back to an equal value."""
    tables: list[str] = []
    _dump_table("", msgspec.to_builtins(config), tables)
    return "\n".join(tables) + "\n"


def _dump_table(prefix: str, table: dict[str, Any], lines: list[str]) -> None:
    if prefix:
        lines.append(f"\n[{prefix}]")
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    # JSON writes strings, numbers and booleans the way TOML reads them.
    lines.extend(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in plain.items())
    for key, value in table.items():
        if isinstance(value, dict) and value:
            _dump_table(f"{prefix}.{key}" if prefix else key, value, lines)


def _load(path: Path, kind: type[_Config]) -> _Config:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or tables within tables without end
        raise ConfigError(f"{path}: is no TOML file: {error}") from error
    try:
        _check_role(table, kind)
        config = read_table(table, kind)
        _check_ops(config.ops)
        _check_slots(config.slots)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    limit = MAX_SOCKET_PATH_BYTES - MAX_SOCKET_NAME_BYTES - 1
    num_bytes = len(os.fsencode(os.path.abspath(config.socket_dir)))
    if num_bytes > limit:
        raise ConfigError(
            f"{path}: socket_dir: got a path of {num_bytes} bytes, expected at most {limit}: the kernel takes socket "
            f"paths of up to {MAX_SOCKET_PATH_BYTES} bytes"
        )
    return config


def _check_role(table: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Refuse keys that agents of the other role have: none of this one's is what was meant."""
    role, other_role, other = (
        ("prefill", "decode", DecodeConfig) if kind is PrefillConfig else ("decode", "prefill", PrefillConfig)
    )
    for key in table:
        if key in other.__struct_fields__ and key not in kind.__struct_fields__:
            raise ConfigError(f"{key}: got a key of {other_role} agents, expected those of a {role} agent in this file")


def _check_ops(ops: OpsConfig) -> None:
    if ops.listen_port and not ops.listen_host:
        raise ConfigError(
            f"ops.listen_host: got nothing, expected the address at which port {ops.listen_port} is served: without "
            "one nothing is"
        )


def _check_slots(slots: SlotConfig) -> None:
    if slots.kind != "device" and slots.gpu != 0:
        raise ConfigError(
            f'slots.gpu: got {slots.gpu!r} with slots.kind {slots.kind!r}, expected kind "device" beside it'
        )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"
