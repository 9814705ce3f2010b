"""Turns any exception into the one line that people read and the exit code that scripts read."""

from __future__ import annotations

from conf.errors import ConfigError
from launch.check import PACKAGES
from launch.errors import Exit, LaunchError


def describe(error: BaseException) -> tuple[str, int]:
    """(line, exit code) of an error; of a bundle, of the first one inside: the others are what followed."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return _line(error), int(_code(error))


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if any(cls.__module__.partition(".")[0] in PACKAGES for cls in type(error).__mro__):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; what was committed stays, and the same run_dir goes on from there"
    if isinstance(error, OSError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}; this is a fault of rollmill: ROLLMILL_DEBUG=1 shows where"


def _code(error: BaseException) -> Exit:
    from stages.errors import ManifestError

    if isinstance(error, LaunchError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    # A run directory that does not fit the command is the command's fault; anything else failed while it ran.
    return Exit.WRONG if isinstance(error, (ManifestError, ConfigError)) else Exit.FAILED
