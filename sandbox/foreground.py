"""The foreground of a terminal: signals to what runs there, and whether who holds the terminal's session lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Final

from sandbox.started import Spawned

_HUNG_UP: Final = 128 + signal.SIGHUP
_HANGUP_S: Final = 1.0
"""How long a killed process may take to be seen dead after what it held was hung up: the kernel does that first."""


async def orphaned(holder: Spawned, exit_code: int) -> bool:
    """Whether the process that held a terminal's session is gone.

    The kernel hangs up what is in the foreground when that process ends, which other children of it may outlive by a
    moment: long enough for a shell to say that its command was hung up, and to take the next one.

    Args:
        holder: that process.
        exit_code: of the command; of one that was hung up nobody believes at once that it was its own doing.
    """
    if exit_code == _HUNG_UP:
        await asyncio.wait({holder.exited}, timeout=_HANGUP_S)
    try:
        return os.tcgetpgrp(holder.master) == 0
    except OSError:  # nobody holds the terminal's other side
        return True


def signal_foreground(master: int, number: signal.Signals, own_group: int) -> bool:
    """Signal the terminal's foreground process group; whether there was one that may be signalled.

    Args:
        master: of the terminal.
        number: the signal.
        own_group: of the shell, which is interrupted but never killed.
    """
    with contextlib.suppress(OSError):
        group = os.tcgetpgrp(master)
        if group > 1 and (group != own_group or number != signal.SIGKILL):
            os.killpg(group, number)
            return True
    return False
