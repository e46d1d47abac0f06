"""What a broken invariant raises."""

from __future__ import annotations


class InvariantBroken(Exception):  # noqa: N818 - it says what happened
    """An invariant does not hold. `kind` is a short name, the same for every schedule that breaks it likewise."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {detail}")


def check(holds: bool, kind: str, detail: str = "") -> None:
    """Raise `InvariantBroken` unless `holds`."""
    if not holds:
        raise InvariantBroken(kind, detail)
