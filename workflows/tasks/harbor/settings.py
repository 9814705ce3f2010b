"""task.toml of the Harbor format, checked: what a rootless sandbox can keep, and by name what it cannot. Pure.

Source: the format's public documentation (harborframework.com/docs/tasks, schema 1.0 to 1.4).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

RESERVED: Final = ("/tests", "/logs", "/solution")
"""Where the format has its own directories; nothing of an agent is taken from there."""
_KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({
        "version", "schema_version", "task", "metadata", "source", "agent", "verifier", "environment", "solution",
        "artifacts",
    }),
    "agent": frozenset({"timeout_sec", "user", "setup_timeout_sec"}),
    "verifier": frozenset({"timeout_sec", "env", "user", "environment_mode"}),
    "environment": frozenset({
        "build_timeout_sec", "docker_image", "cpus", "memory_mb", "memory", "storage_mb", "storage", "gpus",
        "allow_internet", "network_mode", "workdir", "env", "os",
    }),
    "solution": frozenset({"env"}),
}  # fmt: skip
_REFUSED: Final[Mapping[str, str]] = {
    "steps": "a task of several steps: make each step a task",
    "multi_step_reward_strategy": "a task of several steps: make each step a task",
    "verifier.environment": "an image of the verifier's own: tests run in the task's image",
    "verifier.collect": "hooks in services: there are no services",
    "environment.mcp_servers": "MCP servers: give the tools to the agent instead",
    "environment.healthcheck": "services: start them in tests/test.sh and in the instruction",
    "environment.gpu_types": "GPUs in a sandbox",
    "environment.tpu": "TPUs in a sandbox",
    "environment.skills_dir": "skills: put the files into the image",
}
_ROOTS: Final = ("root", 0, "0")
_MODES: Final = ("shared", "separate")


class SettingsError(ValueError):
    """What keeps a task.toml from being used here; one line that names the key."""


@dataclass(frozen=True)
class Settings:
    """What of a task.toml is followed.

    Args:
        image: `environment.docker_image`, a name that the store has; None where a Dockerfile says.
        workdir: where agent and tests begin; None where image or Dockerfile say.
        environment: variables of everything in the sandbox.
        verifier: further ones of the tests.
        solution: further ones of the oracle.
        verifier_s: deadline of the tests, seconds.
        agent_s: deadline of the oracle, seconds; an agent's is the run's own budget.
        build_s: deadline of the Dockerfile's commands, seconds.
        separate: the tests see `artifacts` and nothing else of what the agent did.
        artifacts: absolute paths.
        data_alone: the author states that the tests read what the agent left and never run it.
    """

    image: str | None = None
    workdir: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    verifier: Mapping[str, str] = field(default_factory=dict)
    solution: Mapping[str, str] = field(default_factory=dict)
    verifier_s: float = 600.0
    agent_s: float = 600.0
    build_s: float = 600.0
    separate: bool = False
    artifacts: tuple[str, ...] = ()
    data_alone: bool = False


def settings(data: Mapping[str, Any]) -> Settings:
    """The settings of a task.toml's content.

    Raises:
        SettingsError: a key that is not followed here, or a value that it cannot have.
    """
    _check_keys(data)
    environment, verifier = _table(data, "environment"), _table(data, "verifier")
    agent, solution, metadata = _table(data, "agent"), _table(data, "solution"), _table(data, "metadata")
    for name, table in (("agent.user", agent), ("verifier.user", verifier)):
        if table.get("user", "root") not in _ROOTS:
            raise SettingsError(f"{name} {table['user']!r}: a rootless sandbox has one user, root")
    if environment.get("gpus"):
        raise SettingsError("environment.gpus: sandboxes have no GPUs")
    if environment.get("os", "linux") != "linux":
        raise SettingsError(f"environment.os {environment['os']!r}: sandboxes are Linux")
    mode = verifier.get("environment_mode") or "shared"
    if mode not in _MODES:
        raise SettingsError(f"verifier.environment_mode {mode!r}: allowed are {', '.join(_MODES)}")
    artifacts = tuple(_artifact(one) for one in _list(data, "artifacts"))
    if mode == "separate" and not artifacts:
        raise SettingsError(
            "verifier.environment_mode is separate, and artifacts names nothing that the tests could see"
        )
    return Settings(
        image=_text(environment, "environment.docker_image"), workdir=_path(environment, "environment.workdir"),
        environment=_variables(environment, "environment.env"), verifier=_variables(verifier, "verifier.env"),
        solution=_variables(solution, "solution.env"), verifier_s=_seconds(verifier, "verifier.timeout_sec"),
        agent_s=_seconds(agent, "agent.timeout_sec"), build_s=_seconds(environment, "environment.build_timeout_sec"),
        separate=mode == "separate", artifacts=artifacts, data_alone=metadata.get("artifacts_are_data") is True,
    )  # fmt: skip


def _check_keys(data: Mapping[str, Any]) -> None:
    for section, known in _KNOWN.items():
        table = data if not section else _table(data, section)
        for key, value in table.items():
            name = f"{section}.{key}" if section else key
            if name in _REFUSED and value not in (None, [], {}):
                raise SettingsError(f"{name} is not supported: {_REFUSED[name]}")
            if key not in known and name not in _REFUSED:
                raise SettingsError(f"{name} is no key of the format that is followed here")


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, Mapping):
        raise SettingsError(f"{name} must be a table")
    return value


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name, [])
    if not isinstance(value, list):
        raise SettingsError(f"{name} must be a list")
    return value


def _text(table: Mapping[str, Any], name: str) -> str | None:
    value = table.get(name.rpartition(".")[2])
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise SettingsError(f"{name} must be a text")
    return value


def _path(table: Mapping[str, Any], name: str) -> str | None:
    value = _text(table, name)
    return None if value is None else inside(value, name)


def inside(path: str, name: str) -> str:
    """A directory that may be the agent's, normalized.

    Raises:
        SettingsError: it is not absolute, or one of the format's own.
    """
    plain = posixpath.normpath(path)
    if not path.startswith("/"):
        raise SettingsError(f"{name} {path!r} is not absolute")
    plain = "/" + plain.lstrip("/")
    if any(plain == one or plain.startswith(f"{one}/") for one in RESERVED):
        raise SettingsError(f"{name} {path!r} is the format's own directory")
    return plain


def _artifact(one: Any) -> str:
    source = one.get("source") if isinstance(one, Mapping) else one
    if not isinstance(source, str) or not source or any(sign in source for sign in "*?[\0"):
        raise SettingsError(f"artifacts: {one!r} is no absolute path without wildcards")
    if isinstance(one, Mapping) and set(one) - {"source"}:
        raise SettingsError(
            f"artifacts: {', '.join(sorted(set(one) - {'source'}))} is not supported: paths stay as they are"
        )
    return inside(source, "artifacts")


def _seconds(table: Mapping[str, Any], name: str) -> float:
    value = table.get(name.rpartition(".")[2])
    if value is None:
        return 600.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise SettingsError(f"{name} must be seconds above 0, got {value!r}")
    return float(value)


def _variables(table: Mapping[str, Any], name: str) -> dict[str, str]:
    value = table.get("env", {})
    if not isinstance(value, Mapping):
        raise SettingsError(f"{name} must be a table of texts")
    for key, text in value.items():
        if not key.isidentifier() or not isinstance(text, str) or "\0" in text:
            raise SettingsError(f"{name}: {key!r} must be a variable with a text")
        if "${" in text:
            raise SettingsError(f"{name}: {key} takes a variable of this machine, which no sandbox gets: write it out")
    return dict(value)
