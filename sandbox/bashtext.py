"""The bash that drives one persistent shell: how it starts, is set up, takes a command and reports. Pure.

The pty carries one short line a command; the command itself, of any size, comes through the pipe at descriptor 9, so
neither the terminal's line limit nor an open quote matters. After it bash reads a fresh nonce from the same pipe and
prints the marker to the terminal: in band, because a side channel would overtake output still buffered in the pty.
PROMPT_COMMAND prints it because an interrupt drops the rest of a line, but never the prompt.

Of a pipe bash reads what ends in a delimiter byte by byte, a system call each, which was an eighth of a short shell's
CPU; so what is plain ASCII, whose characters are bytes in every locale, is announced by its length instead.
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

_RUN_LINE = '__rm_go $? {} 2>/dev/null;eval "$__rm_c" 8>&- 9<&-\n'
"""Typed for each command; the command sees neither descriptor, and `$?` of the one before.

No reserved word may begin it or PROMPT_COMMAND: after an open quote bash 5.2 takes the next one for a name.
"""

_SETUP = r"""
exec 8>&1
__rm_go() {
  case $2 in 0) IFS= read -r -d '' -u 9 __rm_c;; *) IFS= read -r -N "$2" -u 9 __rm_c;; esac
  case $- in *e*) return 0;; esac
  return $1
}
__rm_report() {
  local - s=$? n
  set +eu
  IFS= read -r -N 16 -u 9 n
  printf '\036%s %d %s\0' "$n" "$s" "$PWD" >&8
  PS1= PS2=
}
readonly -f __rm_go __rm_report
PROMPT_COMMAND='__rm_report 2>/dev/null'
readonly PROMPT_COMMAND
PS1= PS2=
export -n PS1
set +o history +o histexpand
shopt -u checkwinsize
unset HISTFILE MAILCHECK TMOUT OLDPWD
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
