"""The bash that drives one persistent shell: how it starts, is set up, takes a command and reports. Pure.

A short command is typed as one line in which it is quoted; one of any other size or kind comes through a pipe, so that
neither the terminal's line limit nor an open quote matters. After it bash reads a fresh nonce from that pipe and prints
the marker to the terminal: in band, because a side channel would overtake output still buffered in the pty. The prompt
prints it because an interrupt drops the rest of a line, but never the prompt.

What bash does beside the command is a multiple of the command's own price, so there is little of it: no redirection is
made and undone for a command, since what it must not inherit is closed by exec.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from sandbox.protocols import ShellState
from sandbox.shellstate import option_lines, restore_lines

SHELL_ARGV = ("--norc", "--noprofile", "--noediting", "-i")

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",  # no colours, no cursor movement: the reader is a model
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "VIRTUAL_ENV_DISABLE_PROMPT": "1",
}

NONCE_CHARS = 16
"""Every nonce has so many; they are ASCII."""

_SETUP_LINE = 'IFS= read -r {} -u 9 __rm_c;eval "$__rm_c"\n'
"""Typed once, before anything else."""

_TYPED_LINE = "eval $'{}'\n"
"""Typed for a short command."""

_RUN_LINE = '__rm_go "$?" {} 2>/dev/null;eval "$__rm_c"\n'
"""Typed for any other; `$?` is still that of the command before.

No reserved word may begin what is typed, or PROMPT_COMMAND: after an open quote bash 5.2 takes the next one for a name.
"""

TYPED_CHARACTERS = 960
"""Longest line that is typed for a command: bash takes 1,024 bytes of a terminal at a time."""

_QUOTED = str.maketrans({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "!": "\\041"})
"""As $'...' has them; no exclamation mark is there for a user's history expansion to see."""

_SETUP = r"""
exec 10<&-
{ exec 60<&10; } 9<&- 2>/dev/null || exec 60<&9
exec 9<&-
{ exec 61>&10; } >&- 2>/dev/null || exec 61>&1
__rm_go() {
  case $2 in 0) IFS= read -r -d '' -u 60 __rm_c;; *) IFS= read -r -N "$2" -u 60 __rm_c;; esac
  case $- in *e*) return 0;; esac
  return $1
}
__rm_far() { printf '\036%s %d %s\0' "$__rm_n" "$1" "${PWD-}" >&61; }
__rm_traced() { read -rN 16 -u 60 __rm_n; __rm_far "$1"; PS1= PS2=; } 2>/dev/null
__rm_report() {
  if [[ -o xtrace ]]; then __rm_traced "$1"
  else
    read -rN 16 -u 60 __rm_n
    [[ -t 1 ]] && printf '\036%s %d %s\0' "$__rm_n" "$1" "${PWD-}" || __rm_far "$1"
    PS1= PS2=
  fi
}
readonly -f __rm_go __rm_far __rm_traced __rm_report
PROMPT_COMMAND='__rm_report "$?"'
readonly PROMPT_COMMAND
PS1= PS2=
export -n PS1
set +o history +o histexpand
shopt -u checkwinsize
unset HISTFILE MAILCHECK TMOUT OLDPWD
"""
"""Descriptor 60 becomes the pipe, 61 the terminal; neither is inherited by what the shell executes.

Bash itself closes at exec what it puts aside for the time of a redirection, at the first number from 10 on that is
free, and a copy of such a descriptor is closed as well; a bash that does otherwise hands both on. Where standard output
is the terminal the marker needs no redirection. Under `set -x` three lines tell of the report, not its whole body.
"""


def setup_script(workspace: Sequence[str], cwd: str, state: ShellState | None = None, *, in_job: bool = False) -> str:
    """What the shell is set up with: its reporting, the workspace directories, its variables, and where it stands.

    Args:
        workspace: directories to make where missing.
        cwd: where to start; the root where it is gone.
        state: of an earlier shell: its variables and no others are exported, and what it had defined is defined.
        in_job: whether Slurm's warning, USR2, may come to the shell and all that it runs: they do not hear it.
    """
    lines = [_SETUP, "trap '' USR2"] if in_job else [_SETUP]
    lines += [f"[ -d {path} ] || mkdir -p -- {path}" for path in map(shlex.quote, workspace)]
    if state is not None:
        lines += restore_lines(state)
    lines.append(f"cd -- {shlex.quote(cwd)} 2>/dev/null || cd /")
    if state is not None:
        lines += option_lines(state)
    return "\n".join(lines) + "\n"


def command_packet(command: str, nonce: str) -> tuple[bytes, bytes]:
    """What goes through the pipe for one command, and the line that is typed for it.

    Raises:
        ValueError: the command holds a NUL, which no shell command can.
    """
    if len(command) < TYPED_CHARACTERS and command.isascii():
        quoted = command.translate(_QUOTED)
        if quoted.isprintable() and len(quoted) < TYPED_CHARACTERS:
            return nonce.encode(), _TYPED_LINE.format(quoted).encode()
    data, counted = _packet(command, nonce)
    return data, _RUN_LINE.format(counted).encode()


def setup_packet(script: str, nonce: str) -> tuple[bytes, bytes]:
    """As `command_packet`, for the set-up."""
    data, counted = _packet(script, nonce)
    return data, _SETUP_LINE.format(f"-N {counted}" if counted else "-d ''").encode()


def _packet(text: str, nonce: str) -> tuple[bytes, int]:
    """What goes through the pipe, and the text's length; 0 where it ends in a NUL instead."""
    if "\0" in text:
        raise ValueError("the command holds a NUL byte")
    data = text.encode("utf-8", "surrogateescape")
    counted = len(data) if text.isascii() else 0
    return data + (b"" if counted else b"\0") + nonce.encode(), counted


def shell_env(extra: Mapping[str, str]) -> dict[str, str]:
    """The shell's whole environment: the sandbox's own and the spec's; PS1 empty so that no first prompt is printed."""
    return {**BASE_ENV, **extra, "PS1": ""}
