"""Open files of a process: the soft limit is raised as far as is allowed, and a limit that is too small is refused."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Final

from stages.errors import StageError

NEEDED: Final = 4096
"""A thousand sessions with engines, a thousand shells with two descriptors each, and what a process has anyway."""

Get = Callable[[], tuple[int, int]]
Set = Callable[[tuple[int, int]], None]


class OpenFilesError(StageError):
    """This process may not open as many files as it will need."""


def _get() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _set(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def ensure(needed: int = NEEDED, *, get: Get = _get, change: Set = _set) -> int:
    """Raise the soft limit to what is needed; returns what it is then.

    More than needed is not taken: some libraries close every descriptor that there could be.

    Raises:
        OpenFilesError: the hard limit is below that.
    """
    soft, hard = get()
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return soft
    if hard not in (unlimited, -1) and hard < needed:
        raise OpenFilesError(
            f"open files: the hard limit is {hard}, {needed} are needed; raise it (ulimit -Hn {needed}, or "
            "LimitNOFILE of the service that starts jobs here)"
        )
    change((needed, hard))
    return needed
