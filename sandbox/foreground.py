"""Signals to what runs in the foreground of a terminal."""

from __future__ import annotations

import contextlib
import os
import signal


def leaderless(master: int) -> bool:
    """Whether the process that held the terminal's session is gone.

    The kernel hangs up what is in the foreground when that process ends, which other children of it may outlive by a
    moment: long enough for a shell to say that its command was hung up, and to take the next one.
    """
    try:
        return os.tcgetpgrp(master) == 0
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
