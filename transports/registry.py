"""Transports by name, and how a process that used one ends."""

from __future__ import annotations

import ipaddress
import logging
import os
import pathlib
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from kvxfer.errors import ConfigError
from kvxfer.tables import read_table
from kvxfer.transports._mooncake_engine import MooncakeOptions
from kvxfer.transports._nixl_engine import NixlOptions
from kvxfer.transports.base import Transport
from kvxfer.transports.loopback import LoopbackTransport
from kvxfer.transports.loopback_options import LoopbackOptions
from kvxfer.transports.mooncake import MooncakeTransport
from kvxfer.transports.nixl import NixlTransport

_RDMA_DEVICES = pathlib.Path("/sys/class/infiniband")
TRANSPORT_NAMES = ("loopback", "nixl", "mooncake")
_PREFIX = "transport.options."


def create_transport(
    name: str,
    *,
    incarnation: str,
    host: str = "127.0.0.1",
    options: Mapping[str, object] | None = None,
    is_target: bool = True,
    gpu_index: int = -1,
) -> Transport:
    """Make the transport `name` for the agent run `incarnation`, reachable at the IP address `host`.

    `options` are the fields of the transport's own options class. `is_target`: whether peers write into this side's
    regions; an engine that only writes makes progress when it is looked at, without a thread for it. `gpu_index`: of
    the GPU whose memory is to be registered, -1 where only host memory is.

    Raises `ConfigError` for a name or option that is none, or that does not go with memory of a GPU,
    `EngineMissingError` where the engine is not installed.
    """
    options = options or {}
    address = _address(host)
    if name == "loopback":
        return LoopbackTransport(read_table(options, LoopbackOptions, _PREFIX), gpu_index)
    if name == "nixl":
        parsed = read_table(options, NixlOptions, _PREFIX)
        _check_interface(parsed.interface)
        if not parsed.interface and address.is_loopback:
            parsed = NixlOptions(interface="lo")
        return NixlTransport(incarnation, parsed, is_target=is_target, gpu_index=gpu_index)
    if name == "mooncake":
        if address.version != 4:
            raise ConfigError(f"host: got {host}, expected an IPv4 address: Mooncake reaches peers by no other")
        if gpu_index >= 0:
            raise ConfigError(
                'slots.kind: got "device" with transport mooncake, expected "pinned_host": Mooncake moves memory of a '
                "GPU at 1.5 GB/s over TCP; device slots go over nixl"
            )
        return MooncakeTransport(incarnation, str(address), read_table(options, MooncakeOptions, _PREFIX))
    raise ConfigError(f"transport: got {name!r}, expected one of {', '.join(TRANSPORT_NAMES)}")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(f"host: got {host!r}, expected the IP address that peers reach") from error
    if address.is_unspecified:
        raise ConfigError(f"host: got the wildcard {host}, expected one address that peers reach")
    return address


def _check_interface(interface: str) -> None:
    """UCX names a device `DEVICE` or `DEVICE:PORT`, several with commas between them."""
    known = {name for _, name in socket.if_nameindex()}
    if _RDMA_DEVICES.is_dir():
        known |= {path.name for path in _RDMA_DEVICES.iterdir()}
    for device in interface.split(",") if interface else ():
        if device.partition(":")[0] not in known:
            raise ConfigError(f"transport.interface: got {device!r}, expected one of {', '.join(sorted(known))}")


def exit_process(code: int) -> NoReturn:
    """End the process with `code` after everything was closed, without running destructors of native libraries.

    UCX's RDMA module crashes in them (exit status 139), after Python has ended. Output is flushed and loggers are
    shut down; `atexit` functions do not run.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
