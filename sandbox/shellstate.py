"""A shell's state as bash tells it and takes it up again: directory and exported variables. Pure."""

from __future__ import annotations

from sandbox.errors import ShellDied
from sandbox.protocols import ShellState

STATE_COMMAND = r"""__rm_s=$?
__rm_state() {
  local __rm_o=$(shopt -po) - n l IFS=$'\n'
  set +eux -f
  printf '\036\n'
  for n in $(compgen -e); do
    case $n in PS1|PWD|OLDPWD|SHLVL|_|__rm_*|ROLLMILL_*) ;; *) printf '%s=%q\n' "$n" "${!n}";; esac
  done
  printf '\036\n'
  printf '%q\n' "$(shopt -p)"
  l=$(alias -p)
  [ -z "$l" ] || printf '%q\n' "$l"
  for l in $(declare -F); do
    n=${l#declare -* }
    case $n in __rm_*) continue;; esac
    printf '%q\n' "$(declare -f -- "$n")"
    case ${l%%"$n"} in *x*) printf -v n %q "$n"; printf '%q\n' "export -f -- $n";; esac
  done
  printf '\036\n%s\n\036\n' "$__rm_o"
}
__rm_state
unset -f __rm_state
__rm_end() { unset -f __rm_end; unset -v __rm_s; return $1; }
__rm_end $__rm_s
"""
"""Prints variables, definitions, options between record separators and keeps `$?`; builtins alone, whatever PATH is."""

_RESTORE = r"""
for __rm_n in $(compgen -e); do
  case $__rm_n in PS1|PWD|OLDPWD|SHLVL|_|__rm_*|ROLLMILL_*) ;; *) unset -v "$__rm_n";; esac
done
unset __rm_n
"""
_OURS = frozenset({"emacs", "histexpand", "history", "monitor", "noexec", "onecmd", "privileged", "vi"})
"""Options that the terminal itself needs as they are, or that would end the shell."""


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
    if len(parts) != 5:
        raise ShellDied(f"the shell does not tell its state: {output[-200:]!r}", boundary="shell")
    _, exports, definitions, options, _ = parts
    return ShellState(cwd, exports, root, definitions, options)


def moved(state: ShellState, root: str) -> ShellState:
    """The state in a sandbox whose paths begin with another root."""
    if not state.root or state.root == root:
        return state
    cwd, exports, definitions = (
        text.replace(state.root, root) for text in (state.cwd, state.exports, state.definitions)
    )
    return ShellState(cwd, exports, root, definitions, state.options)


def restore_lines(state: ShellState) -> list[str]:
    """Bash that makes the state's variables, and no others, the exported ones, and defines what it had defined."""
    return [
        _RESTORE,
        *(f"export {line}" for line in state.exports.split("\n") if line),
        # Each by itself: one that this bash does not take keeps no other away.
        *(f"eval {line} 2>/dev/null" for line in state.definitions.split("\n") if line),
    ]


def option_lines(state: ShellState) -> list[str]:
    """Bash that sets the state's options; the last that is done, for they would change what comes before."""
    lines = [line for line in state.options.split("\n") if line.startswith(("set -o ", "set +o "))]
    return [f"{line} 2>/dev/null" for line in lines if line[7:] not in _OURS]
