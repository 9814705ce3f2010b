"""Calls from a sandbox's tools back to their sandbox that do not keep it: what is done with is freed at once.

A sandbox and tools that hold each other wait for the garbage collector, with all that hangs on them; to collect what
hundreds of rollouts left stopped a worker's loop for 20 to 70 ms.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from sandbox.errors import SandboxError

Owner = TypeVar("Owner")
Given = TypeVar("Given")


def weakly(owner: Owner, method: Callable[[Owner], Given]) -> Callable[[], Given]:
    """The owner's method; it raises SandboxError where the owner has gone, which nobody stopped then."""
    reference = weakref.ref(owner)

    def call() -> Given:
        if (found := reference()) is None:
            raise SandboxError("the sandbox has gone; create another", boundary="start")
        return method(found)

    return call
