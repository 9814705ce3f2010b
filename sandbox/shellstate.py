"""A shell's state as bash tells it and takes it up again: directory and exported variables. Pure."""

from __future__ import annotations

from sandbox.errors import ShellDied
from sandbox.protocols import ShellState

STATE_COMMAND = r"""__rm_s=$?
__rm_state() {
  local - n IFS=$'\n'
  set +eux
  printf '\036\n'
  for n in $(compgen -e); do
    case $n in PS1|PWD|OLDPWD|SHLVL|_|ROLLMILL_*) ;; *) printf '%s=%q\n' "$n" "${!n}";; esac
  done
  printf '\036\n'
}
__rm_state
unset -f __rm_state
__rm_end() { unset -f __rm_end; unset -v __rm_s; return $1; }
__rm_end $__rm_s
"""
"""Prints the exported variables between two record separators and keeps `$?`; builtins alone, whatever PATH is."""

_RESTORE = r"""
for __rm_n in $(compgen -e); do
  case $__rm_n in PS1|PWD|OLDPWD|SHLVL|_|ROLLMILL_*) ;; *) unset -v "$__rm_n";; esac
done
unset __rm_n
"""


def read_state(output: str, cwd: str, root: str) -> ShellState:
    """The state in what STATE_COMMAND printed.

    Args:
        output: of the command.
        cwd: the shell's directory.
        root: what stands before every path of the sandbox.

    Raises:
        ShellDied: the output is not whole.
    """
    parts = output.replace("\r\n", "\n").split("\036\n")
    if len(parts) != 3:
        raise ShellDied(f"the shell does not tell its variables: {output[-200:]!r}", boundary="shell")
    return ShellState(cwd, parts[1], root)


def moved(state: ShellState, root: str) -> ShellState:
    """The state in a sandbox whose paths begin with another root."""
    if not state.root or state.root == root:
        return state
    return ShellState(state.cwd.replace(state.root, root, 1), state.exports.replace(state.root, root), root)


def restore_lines(exports: str) -> list[str]:
    """Bash that makes these, and no others, the exported variables."""
    return [_RESTORE, *(f"export {line}" for line in exports.split("\n") if line)]
