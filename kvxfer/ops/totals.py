"""What a core has done since it was made, for logs and metrics.

The loop's thread alone writes here, plain numbers; the thread that serves metrics reads them as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxfer.transfer import EventKind, Reason


@dataclass(slots=True)
class Totals:
    """Sums over all transfers: seconds of work by stage, ends by kind and reason, bytes of those that ended well."""

    log: logging.Logger
    plan_s: float = 0.0
    pack_s: float = 0.0
    send_s: float = 0.0
    scatter_s: float = 0.0
    num_bytes: int = 0
    ends: Counter[tuple[EventKind, Reason | None]] = field(default_factory=Counter)

    def ended(self, transfer: str, kind: EventKind, reason: Reason | None, detail: str, num_bytes: int) -> None:
        """A transfer of `num_bytes` has come to its one end; one without success is logged with the same reason."""
        self.ends[kind, reason] += 1
        if reason is None:
            self.num_bytes += num_bytes
        else:
            self.log.info(
                "transfer %s %s: %s", transfer, kind.value, detail or reason.value, extra={"reason": reason.value}
            )


@dataclass(frozen=True, slots=True)
class CoreFigures:
    """A core at one moment. Slots are counted by state, refused messages by what was wrong with them, legs in mode
    auto by the mode that was chosen."""

    totals: Totals
    num_open: int
    slots: Mapping[str, int]
    refused: Mapping[str, int]
    chosen: Mapping[str, int] = field(default_factory=dict)
    num_fallbacks: int = 0
