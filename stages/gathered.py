"""Small blocking calls of many tasks in one turn of a thread: the way there and back costs more than most of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Gathered:
    """Calls that tasks make in one turn of the event loop; belongs to one loop.

    They wait for one another, so they are to be alike. Those of a later turn go to a thread of their own.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; a call whose task is cancelled is made all the same."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._begin)
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.append((work, answer))
        return await answer

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, []
        calls = [work for work, _ in waiting]
        made = asyncio.get_running_loop().run_in_executor(None, _make, calls)
        made.add_done_callback(lambda made: _tell(made, [answer for _, answer in waiting]))


def _make(calls: Sequence[Callable[[], Any]]) -> list[tuple[Any, Exception | None]]:
    found: list[tuple[Any, Exception | None]] = []
    for call in calls:
        try:
            found.append((call(), None))
        except Exception as error:  # noqa: BLE001 - it is raised where the call was asked for
            found.append((None, error))
    return found


def _tell(made: asyncio.Future[list[tuple[Any, Exception | None]]], answers: Sequence[asyncio.Future[Any]]) -> None:
    if made.cancelled():
        found: list[tuple[Any, Exception | None]] = []
    elif (failure := made.exception()) is not None:
        found = [(None, failure if isinstance(failure, Exception) else RuntimeError(str(failure)))] * len(answers)
    else:
        found = made.result()
    for (value, error), answer in zip(found, answers, strict=False):
        if answer.done():
            continue
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
