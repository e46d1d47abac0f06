"""An asyncio client behind the blocking interface, so that one test serves both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from kvxfer.control.client import (
    AsyncDecodeClient,
    AsyncPrefillClient,
)


class Blocking:
    """An asyncio client behind the blocking interface, on an event loop of its own."""

    def __init__(self, client: AsyncPrefillClient | AsyncDecodeClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (it stands for two classes)
        member = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(member):
            return member
        return lambda *args, **kwargs: self._runner.run(member(*args, **kwargs))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._runner.close()


Connect = Callable[..., Any]


def connect_async(role: type[AsyncPrefillClient | AsyncDecodeClient]) -> Connect:
    """`connect` of an asyncio client, as a blocking call that returns it behind `Blocking`."""

    def connect(*args: object, **kwargs: object) -> Blocking:
        runner = asyncio.Runner()
        connecting: Awaitable[Any] = role.connect(*args, **kwargs)  # type: ignore[arg-type]
        try:
            return Blocking(runner.run(connecting), runner)  # type: ignore[arg-type]
        except BaseException:
            runner.close()
            raise

    return connect
