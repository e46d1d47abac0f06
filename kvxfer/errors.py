"""Everything kvxfer raises.

KvxferError
├── ConfigError            a configuration file or command line: key, got, expected
├── ContractError          a caller broke an interface (also a ValueError): argument, got, expected
│   ├── LayoutError        groups, shards, token ranges or pages that cannot be
│   └── KernelContractError  a kernel wrapper's tensors: dtype, shape, stride, device
├── HandoffError           a pool hand-off that was refused before anything was mapped
├── ControlError           control plane
│   ├── ProtocolError      a frame that does not parse or is out of bounds
│   ├── PairingError       two agents do not fit together: names the field
│   ├── RefusedError       the agent refused a request: carries its reason
│   ├── AgentLostError     the agent is gone or does not answer
│   └── ControlTimeoutError  no answer within the caller's time-out (also a TimeoutError)
├── IntegrityError         bytes changed on their way: names the place
└── TransportError         a transfer engine
    ├── EngineMissingError   the engine or a system library is not installed: names the package
    ├── PeerLostError        the peer is gone
    ├── RegistrationError    memory that cannot be registered
    └── BoundsError          a write outside a registered region
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.transfer import Reason


class KvxferError(Exception):
    """Base of every error that kvxfer raises."""


class ConfigError(KvxferError):
    """A configuration file or command line is wrong; the message names key, got and expected."""


class ContractError(KvxferError, ValueError):
    """A caller broke an interface; the message names argument, got and expected."""


class LayoutError(ContractError):
    """Groups, shards, token ranges or pages that cannot be."""


class KernelContractError(ContractError):
    """A kernel wrapper was given tensors outside its contract; raised before any launch."""


class HandoffError(KvxferError):
    """A pool hand-off was refused; nothing was mapped."""


class ControlError(KvxferError):
    """Something went wrong between processes on the control plane."""


class ProtocolError(ControlError):
    """A frame does not parse, is out of bounds or is not of a known kind."""


class PairingError(ControlError):
    """Two agents do not fit together; the message names the field."""


class RefusedError(ControlError):
    """An agent refused a request and changed nothing.

    `reason` is one of the words in `kvxfer.transfer`, or None; `detail` says more; `field` names what was wrong, or
    is empty.
    """

    def __init__(self, detail: str, reason: Reason | None = None, field: str = "") -> None:
        self.detail = detail
        self.reason = reason
        self.field = field
        where = f" ({field})" if field else ""
        super().__init__(f"{reason.value if reason else 'refused'}{where}: {detail}")


class AgentLostError(ControlError):
    """The agent is gone or does not answer."""


class ControlTimeoutError(ControlError, TimeoutError):
    """No answer came within the caller's time-out."""


class IntegrityError(KvxferError):
    """A segment's bytes are not those that its source packed; the message names the place."""


class TransportError(KvxferError):
    """A transfer engine reported an error."""


class EngineMissingError(TransportError):
    """The engine or a system library that it loads is not installed; the message names the package."""


class PeerLostError(TransportError):
    """The peer of a transfer is gone."""


class RegistrationError(TransportError):
    """Memory could not be registered with the engine."""


class BoundsError(TransportError):
    """A write lies outside the region it names."""
