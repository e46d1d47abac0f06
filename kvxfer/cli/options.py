"""Options of the command line whose help shows what they take, and whose errors say option, got and expected."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import typer

from kvxfer.errors import ConfigError

_Choice = TypeVar("_Choice", bound=enum.Enum)


def choice(name: str, of: type[_Choice], text: str) -> Any:  # noqa: ANN401 - what typer takes as an annotation
    """Option `name`, one of the values of `of`. `text` is its help."""
    values = [each.value for each in of]

    def parse(got: str) -> _Choice:
        try:
            return of(got)
        except ValueError as error:
            raise ConfigError(f"{name}: got {got!r}, expected {', '.join(values[:-1])} or {values[-1]}") from error

    return typer.Option(name, parser=parse, metavar=f"[{'|'.join(values)}]", help=text)


def whole(name: str, text: str, least: int, most: int | None = None) -> Any:  # noqa: ANN401 - as above
    """Option `name`, a whole number from `least` to `most`, without an upper limit where that is None."""
    expected = f"at least {least}" if most is None else f"{least} to {most}"

    def parse(got: str) -> int:
        try:
            value = int(got)
        except ValueError as error:
            raise ConfigError(f"{name}: got {got!r}, expected a whole number, {expected}") from error
        if value < least or (most is not None and value > most):
            raise ConfigError(f"{name}: got {value}, expected {expected}")
        return value

    return typer.Option(name, parser=parse, metavar=f"INTEGER, {expected}", help=text)
