"""Errors of the Slurm client: Slurm did not answer, or it answered no."""

from __future__ import annotations

from launch.errors import LaunchError


class SlurmError(LaunchError):
    """Root of what a Slurm client raises; `command` is what was asked, in one line.

    Args:
        message: what, where, what to do.
        command: the command or call.
    """

    def __init__(self, message: str, *, command: str = "") -> None:
        super().__init__(message)
        self.command = command


class SlurmUnavailable(SlurmError):
    """Nobody answered: no such command here, no controller, or no answer in time.

    A call that was to change something may have taken effect where `may_have_happened` is true; `no_command` says that
    the program itself is not there, so that another one may well get an answer.
    """

    def __init__(
        self, message: str, *, command: str = "", may_have_happened: bool = False, no_command: bool = False
    ) -> None:
        super().__init__(message, command=command)
        self.may_have_happened, self.no_command = may_have_happened, no_command


class SlurmRefused(SlurmError):
    """Slurm answered with an error of its own; `said` is its first line."""

    def __init__(self, message: str, *, command: str = "", said: str = "") -> None:
        super().__init__(message, command=command)
        self.said = said
