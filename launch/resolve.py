"""Fills what only the moment of launch knows: run directory, action, absolute paths."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from conf.schema import Agent, Config, Task


def resolve(config: Config, *, cwd: Path, now: datetime, token: str) -> Config:
    """The configuration as it goes into the run directory.

    Args:
        config: as composed.
        cwd: what relative paths are relative to.
        now: the time in the name of a run directory that was not given.
        token: some hex digits that tell two launches in one second apart.
    """
    task = replace(config.task, name=_own_name(config.task), path=_absolute_or_none(config.task.path, cwd))
    name = f"{config.workflow.name}-{task.name}-{now:%Y%m%d-%H%M%S}-{token[:4]}"
    return replace(
        config,
        action=config.action or ("run" if config.placement.name == "local" else "submit"),
        run_dir=_absolute(config.run_dir or f"runs/{name}", cwd),
        store=_absolute_or_none(config.store, cwd),
        task=task,
        agent=replace(config.agent, name=_own_name(config.agent)),
        fleet=replace(config.fleet, model=_model(config, cwd)),
        evaluate=replace(config.evaluate, run_dir=_absolute_or_none(config.evaluate.run_dir, cwd)),
        import_path=[_absolute(path, cwd) for path in config.import_path],
    )


def at_point(config: Config, base: str | None, place: int, *, cwd: Path, now: datetime, token: str) -> Config:
    """The configuration of the n-th point of a sweep: its run directory is a numbered one below the sweep's own."""
    base = base or config.run_dir or f"runs/sweep-{now:%Y%m%d-%H%M%S}-{token[:4]}"
    return resolve(replace(config, run_dir=f"{base}/{place}"), cwd=cwd, now=now, token=token)


def _model(config: Config, cwd: Path) -> str:
    """A directory becomes absolute, since other processes have other working directories; a name stays a name."""
    model = config.fleet.model
    is_path = "/" in model or model.startswith((".", "~"))
    return _absolute(model, cwd) if is_path and config.fleet.name != "external" else model


def _own_name(part: Task | Agent) -> str:
    """A user's own class that was given no name is called by its class."""
    return part._target_.rpartition(".")[2] if part.name == "own" else part.name


def _absolute_or_none(path: str | None, cwd: Path) -> str | None:
    return _absolute(path, cwd) if path else None


def _absolute(path: str, cwd: Path) -> str:
    # Symbolic links stay: on clusters the canonical path of a filesystem is often the less stable name.
    whole = cwd / Path(path).expanduser()
    parts: list[str] = []
    for part in whole.parts:
        if part != "..":
            parts.append(part)
        elif len(parts) > 1:
            parts.pop()
    return str(Path(*parts))
