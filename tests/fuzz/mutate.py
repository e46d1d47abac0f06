"""Turns valid messages into nearly valid ones: bytes are hit, and values inside msgpack trees are exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 53,
    (1 << 53) + 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
    0.5,
    math.nan,
    math.inf,
    "",
    "a" * 32,
    "A" * 32,
    "\0",
    "x" * 3000,
    b"",
    b"\xff" * 70_000,
    [],
    [0, 0],
    [5, 3],
    [[0, 1 << 31]] * 65,
    [0] * 5000,
    {},
    {"a": 1},
)


def mutate(rng: Random, valid: Sequence[bytes]) -> bytes:
    """One of `valid`, changed in one to three places, now and then not at all."""
    data = rng.choice(valid)
    for _ in range(rng.randint(0, 3)):
        data = rng.choice(_WAYS)(rng, data)
    return data


def _exchange_value(rng: Random, data: bytes) -> bytes:
    try:
        tree = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _flip(rng, data)
    slots = _slots(tree)
    if not slots:
        return msgspec.msgpack.encode(rng.choice(HOSTILE))
    container, key = rng.choice(slots)
    action = rng.randrange(4)
    if action == 0 and isinstance(container, dict):
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[rng.choice(("extra", "", "v", "transfer"))] = rng.choice(HOSTILE)
    elif action == 2 and isinstance(container, list):
        container.append(container[key])
    else:
        container[key] = rng.choice(HOSTILE)
    return msgspec.msgpack.encode(tree)


def _slots(tree: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    """Every (container, key or index) in a tree."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            todo.append(node[key])
    return found


def _flip(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _repeat(rng: Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    part = data[start : start + rng.randrange(1, 65)]
    return data[:start] + part * rng.choice((2, 3, 1000)) + data[start:]


def _insert(rng: Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.randbytes(rng.randrange(1, 9)) + data[start:]


def _nest(rng: Random, data: bytes) -> bytes:
    """Arrays and maps within each other, far deeper than any message."""
    return data[: rng.randrange(len(data) + 1)] + rng.choice((b"\x91", b"\x81\xa1a")) * 5000


_WAYS: tuple[Callable[[Random, bytes], bytes], ...] = (
    _exchange_value,
    _exchange_value,
    _exchange_value,
    _flip,
    _cut,
    _repeat,
    _insert,
    _nest,
)
