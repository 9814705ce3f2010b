"""Signals to what runs in the foreground of a terminal."""

from __future__ import annotations

import contextlib
import os
import signal


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
