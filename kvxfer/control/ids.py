"""Ids: 128 random bits in hex, made by us and compared whole."""

from __future__ import annotations

import secrets


def new_id() -> str:
    """32 lower-case hex digits for a transfer, an incarnation or a pool."""
    return secrets.token_hex(16)
