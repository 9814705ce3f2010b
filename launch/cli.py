"""`rollmill`: takes the command line apart, checks the installation, turns every error into one line and an exit code.

Nothing heavy is imported before it is known to be needed: `--help` must answer at once, also from a slow filesystem.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.check import check_packages
from launch.commands import run_verb, verb_names
from launch.errors import CommandError, Exit
from launch.failures import describe


@dataclass
class Command:
    """What the command line asks for when it names no verb."""

    overrides: list[str] = field(default_factory=list)
    config_dirs: list[Path] = field(default_factory=list)
    sweep: bool = False
    show: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        check_packages()
        return _dispatch(args)
    except SystemExit as left:  # argparse's way to end after a verb's --help
        return int(left.code or 0)
    # The outermost boundary: whatever a stage or a library raises, the user gets one line and a non-zero exit.
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - see above
        return _say(error)


def parse(args: Sequence[str]) -> Command:
    """Take the options and overrides apart.

    Raises:
        CommandError: an option that does not exist or lacks its value.
    """
    command, rest = Command(), list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if arg in ("-h", "--help", "--version"):
            command.show = arg
        elif arg in ("-m", "--multirun"):
            command.sweep = True
        elif name in ("--config-dir", "-cd"):
            if not equals and not rest:
                raise CommandError("--config-dir needs a directory: --config-dir DIR")
            command.config_dirs.append(Path(value if equals else rest.pop(0)))
        elif name == "--help-config":
            command.show = f"--help-config={value or (rest.pop(0) if rest and not equals else '')}"
        elif arg.startswith("-"):
            raise CommandError(f"{arg} is not an option; see rollmill --help")
        else:
            command.overrides.append(arg)
    return command


def _dispatch(args: list[str]) -> int:
    if args and args[0] in verb_names():
        return _printing(lambda: run_verb(args[0], args[1:]))
    if args and "=" not in args[0] and not args[0].startswith(("-", "~")):
        raise CommandError(f"{args[0]!r} is not a verb{_near(args[0])}; see rollmill --help")
    command = parse(args)
    if command.show is not None or not args:
        return _printing(lambda: _show(command.show or "--help"))
    from launch.start import launch, sweep  # Hydra's import takes a third of a second

    return (
        sweep(command.overrides, command.config_dirs)
        if command.sweep
        else launch(command.overrides, command.config_dirs)
    )


def _printing(act: Callable[[], int]) -> int:
    """Act; a reader of our output that has gone (head, less) ends it without a complaint."""
    try:
        code = act()
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again at exit, which must find somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    return code


def _show(what: str) -> int:
    from launch import help as texts

    if what == "--version":
        _print(texts.version())
    elif what.startswith("--help-config="):
        _print(texts.key_help(what.partition("=")[2]))
    else:
        _print(texts.usage())
    return Exit.DONE


def _near(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, verb_names(), n=1)
    return f"; did you mean {near[0]}?" if near else f" (verbs: {', '.join(verb_names())})"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _say(error: BaseException) -> int:
    if os.environ.get("ROLLMILL_DEBUG") == "1":
        traceback.print_exception(error)
    message, code = describe(error)
    sys.stderr.write(f"rollmill: {message}\n")
    return code
