"""TCP addresses of agents: one named, numeric address and a port, never a wildcard."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from kvxfer.errors import ConfigError, ProtocolError

_ENDPOINT = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]{1,15})?)\]|(?P<v4>[0-9.]+)):(?P<port>[0-9]{1,5})"
)


def resolve(host: str, key: str) -> str:
    """The numeric address of `host` (IPv4, IPv6 with or without brackets, or a name), as it was configured in `key`.

    Names are resolved here, once, because the control plane's threads must never wait for a name server.
    Raises `ConfigError` where there is no such address.
    """
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not name:
        raise ConfigError(f"{key}: got {host!r}, expected an address such as 10.0.0.5 or [::1]")
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{key}: got {host!r}, expected an address or a known host name ({error})") from error
    address = str(found[0][4][0])
    zone = name.partition("%")[2]
    return f"{address.partition('%')[0]}%{zone}" if zone else address


def is_wildcard(address: str) -> bool:
    """Whether a numeric address stands for all addresses of the host (`0.0.0.0`, `::`, `::ffff:0.0.0.0`)."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return parsed.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_loopback(address: str) -> bool:
    """Whether a numeric address can be reached from this host alone (`127.0.0.1`, `::1`, `::ffff:127.0.0.1`)."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def format_endpoint(address: str, port: int) -> str:
    """`tcp://10.0.0.5:4711` or `tcp://[::1]:4711`."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def check_endpoint(endpoint: str) -> tuple[str, int]:
    """Address and port of an endpoint that a peer or a ticket named.

    Raises `ProtocolError` unless it is `tcp://`, one numeric address that is no wildcard, and a port in [1, 65535].
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is not None:
        address, port = match["v6"] or match["v4"], int(match["port"])
        if _is_numeric(address) and not is_wildcard(address) and 1 <= port <= 65535:
            return address, port
    raise ProtocolError(
        f"endpoint: got {endpoint[:300]!r}, expected tcp://ADDRESS:PORT with a numeric address that is no wildcard"
    )


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def bind_error(host: str, port: int, number: int | None, text: str) -> ConfigError:
    """What to tell about a bind that failed with the error `number`, which the system words as `text`."""
    if number == errno.EADDRINUSE:
        return ConfigError(f"port: {port} on {host!r} is taken: choose another, or 0 for any free one")
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return ConfigError(f"host: got {host!r}, expected an address of this machine")
    return ConfigError(f"host: cannot listen on {host!r} port {port}: {text}")
