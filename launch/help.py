"""The texts of `--help`, `--help-config` and `--version`: pure functions to text."""

from __future__ import annotations

import textwrap
from importlib import metadata, resources
from typing import Any

from conf.choices import GROUPS
from conf.errors import ConfigError
from conf.explain import Key, keys
from launch.commands import VERBS

_WIDTH = 110


def usage() -> str:
    """What `rollmill --help` prints: usage, verbs, groups with their choices, every key by name."""
    lines = [
        "rollmill: rollouts as a service for multi-turn LLM agents",
        "",
        "  rollmill [GROUP=CHOICE ...] [KEY=VALUE ...] [-m] [--config-dir DIR]    roll out",
        "  rollmill VERB [RUN_DIR] ...                                            look at a run, or act on it",
        "  rollmill --help-config [KEY]                                           each key: type, default, meaning",
        "",
        "  rollmill experiment=demo                        the laptop demo, into runs/demo",
        "  rollmill group_size=8 task.limit=16             16 tasks, 8 rollouts each",
        "  rollmill action=plan experiment=demo            what would be started, and nothing is",
        "  rollmill -m sampling.temperature=0.7,1.0        one run a point",
        "",
        "Verbs (RUN_DIR: the newest one under runs/ if not given):",
        *(f"  {verb.name:<8} {verb.sentence}{'' if verb.module else ' (not built yet)'}" for verb in VERBS),
        "",
        "Groups:",
        *(_wrapped(f"  {group:<11}", ", ".join(shipped_choices(group))) for group in GROUPS),
        "",
        "Keys:",
        *(_wrapped("  ", line) for line in _key_lines()),
        "",
        "Options: -h, --help · --version · -m, --multirun (sweep) · --config-dir DIR (your own choices; repeatable)",
        "Exit codes: 0 done · 1 the run failed · 2 config or command wrong · 75 requeued · 130 interrupted.",
        "ROLLMILL_DEBUG=1 adds the traceback to an error.",
    ]
    return "\n".join(lines)


def key_help(prefix: str = "") -> str:
    """Every key at or below `prefix` with what it takes, its default and its sentence.

    Raises:
        ConfigError: there is no such key.
    """
    found = keys(prefix)
    if not found:
        raise ConfigError(f"{prefix} is not a key; rollmill --help lists them all", key=prefix)
    return "\n".join(_explained(key) for key in found)


def version() -> str:
    """The distribution's version; "unknown" for a source tree that was never installed."""
    try:
        return f"rollmill {metadata.version('rollmill')}"
    except metadata.PackageNotFoundError:
        return "rollmill unknown"


def shipped_choices(group: str) -> list[str]:
    """The choices of a group that come with rollmill, in alphabetical order."""
    files = (entry.name for entry in resources.files("conf").joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def _key_lines() -> list[str]:
    """Keys in the schema's order, those of one section on one line."""
    lines: dict[str, list[str]] = {}
    for key in keys():
        if not key.section:
            section = key.name.rpartition(".")[0]
            lines.setdefault(section, []).append(key.name)
    return [", ".join(names) for _, names in sorted(lines.items(), key=lambda item: item[0] != "")]


def _explained(key: Key) -> str:
    if key.section:
        return f"\n{key.name}: {key.sentence}"
    return f"  {key.name} = {_shown(key.default)}\n      {key.sentence} ({key.allowed})"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "''" if value == "" else str(value)


def _wrapped(indent: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_on_hyphens=False,
        break_long_words=False,
    )
