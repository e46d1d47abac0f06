"""What commands print: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.errors import ConfigError, ContractError, KvxferError

EXIT_FAILED = 1
EXIT_USAGE = 2


def report_error(error: KvxferError) -> int:
    """Say what went wrong on standard error; returns the exit status: 2 for wrong input, 1 for anything else."""
    sys.stderr.write(f"kvxfer: {error}\n")
    return EXIT_USAGE if isinstance(error, (ConfigError, ContractError)) else EXIT_FAILED


def check_plot_file(path: Path) -> None:
    """Raise `ConfigError` unless a plot can be written into `path`: before a long run, not after it. A file that is
    there stays as it is, and none is made."""
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--plot: got {path}, expected a file that can be written ({error.strerror})") from error


def print_json(result: dict[str, Any]) -> None:
    """One JSON object on standard output, indented; times and rates to five digits."""
    rounded = msgspec.json.format(msgspec.json.encode(_round(result)), indent=2)
    sys.stdout.write(rounded.decode() + "\n")
    sys.stdout.flush()


def _round(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _round(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_round(each) for each in value]
    return value


class Steps:
    """Says which step of a long command runs, on a terminal only."""

    def __init__(self, set_text: Callable[[str], None] | None = None) -> None:
        self._set_text = set_text

    def __call__(self, text: str) -> None:
        if self._set_text is not None:
            self._set_text(text)


@contextmanager
def show_steps() -> Iterator[Steps]:
    """A spinner on standard error while a command works, or nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield Steps()
        return
    # Only here: agents do without rich.
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield Steps(status.update)
