"""Tables of a configuration file as typed structs: one error for what is wrong, with key, got and expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from kvxfer.errors import ConfigError

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def read_table(table: Mapping[str, Any], kind: type[_Struct], prefix: str = "") -> _Struct:
    """`table` as a `kind`. Raises `ConfigError`, whose message begins with `prefix` and the key."""
    _check_keys(prefix, table, kind)
    try:
        return msgspec.convert(dict(table), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(prefix + _explain(str(error), table, kind)) from error


def _check_keys(prefix: str, table: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Refuse keys that `kind` has not, and tables that are none, with the nearest key that it has."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            expected = ", ".join(fields)
            raise ConfigError(f"{prefix}{key}: no such key, expected one of {expected}{_nearest(key, fields, prefix)}")
        section = _struct_of(fields[key])
        if section is not None and isinstance(value, dict):
            _check_keys(f"{prefix}{key}.", value, section)


def _nearest(given: str, names: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(given, list(names), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _struct_of(expected: Any) -> type[msgspec.Struct] | None:  # noqa: ANN401
    """The struct that a field holds, maybe as one of several types."""
    for each in (expected, *get_args(expected)):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            return each
    return None


def _explain(message: str, table: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """msgspec's "Expected X - at `$.a.b`" as "a.b: got V, expected X"."""
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        return f"{missing[1]}: got nothing, expected a value: this key has no default"
    found = re.fullmatch(r"(.*?)(?:, got `\w+`)? - at `\$\.?([\w.]+)(?:\[.*)?`", message)
    if found is None:
        return message
    value: Any = table
    expected: Any = kind
    for key in found[2].split("."):
        value = value[key]
        section = _struct_of(expected)
        assert section is not None
        expected = next(field.type for field in msgspec.structs.fields(section) if field.name == key)
    if get_origin(expected) is Literal:
        names = get_args(expected)
        return f"{found[2]}: got {value!r}, expected one of {', '.join(names)}{_nearest(str(value), names)}"
    unit = {"bytes": " (bytes)", "s": " (seconds)"}.get(found[2].rpartition("_")[2], "")
    wanted = found[1].removeprefix("Expected ").replace("`object`", "a table")
    return f"{found[2]}: got {value!r}, expected {wanted}{unit}"
