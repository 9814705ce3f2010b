"""Errors of the launcher: what stops a command, with the exit code that says which kind of trouble it is."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `rollmill`, part of its contract with scripts and batch systems."""

    DONE = 0
    FAILED = 1
    WRONG = 2
    REQUEUED = 75
    INTERRUPTED = 130


class LaunchError(Exception):
    """Root of what the launcher raises; the message is one line: what, where, what to do."""

    exit_code = Exit.FAILED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class CommandError(LaunchError):
    """The command line cannot be understood or asks for something that is not there."""

    exit_code = Exit.WRONG


class InstallationError(LaunchError):
    """The packages that would run are not the ones of this installation."""

    exit_code = Exit.WRONG
