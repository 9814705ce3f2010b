"""What a trusted interpreter runs first in a sandbox: it hides from the agent's code, then runs what it was sent.

Its text is sent there, and it imports the standard library alone. Started as `python3 -I -S -B -c TEXT`, so no site
directory, no variable and no file of a workspace has a say. It takes everything from its standard input: a key, the
modules to run, what they are given. From then on no other process of its user can read its memory or its descriptors,
so neither the key nor a hidden test can be had from it; its report is a line for each record, numbered and marked
with the key, over a pipe that its children do not inherit.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

_REPORT_FD = 3
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


def load(modules: dict[str, str]) -> types.ModuleType:
    """Make modules of their texts, in order; the last is returned."""
    made = types.ModuleType("empty")
    for name, text in modules.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            above = ".".join(parts[:count])
            if above not in sys.modules:
                sys.modules[above] = types.ModuleType(above)
                sys.modules[above].__path__ = []
        made = types.ModuleType(name)
        sys.modules[name] = made
        exec(compile(text, "<" + name + ">", "exec"), made.__dict__)  # noqa: S102 - what the trusted side has sent
    return made


def reporter(key: bytes, descriptor: int) -> Callable[[Any], None]:
    """The function that reports a record."""
    count = 0

    def tell(record: Any) -> None:
        nonlocal count
        body = json.dumps(record).encode()
        mark = hmac.new(key, b"%d:" % count + body, hashlib.sha256).hexdigest().encode()
        count += 1
        # The line begins anew, so that bytes which others have put into the pipe spoil no record.
        left = b"\n" + mark + b" " + body + b"\n"
        while left:
            left = left[os.write(descriptor, left) :]

    return tell


def main() -> None:
    """Hide, say that grading begins, run."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0):
        sys.exit("this process cannot be hidden from others: prctl(PR_SET_DUMPABLE) fails")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = json.loads(sys.stdin.buffer.read())
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    report = os.dup(_REPORT_FD)  # like every descriptor of Python's, not inherited
    os.close(_REPORT_FD)
    tell = reporter(bytes.fromhex(given.pop("key")), report)
    sys.path.extend(given.pop("paths"))
    tell({"hello": list(sys.version_info[:3])})
    load(given.pop("modules")).main(given, tell)


if __name__ == "__main__":
    main()
