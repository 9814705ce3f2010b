"""Puts a config's classes together: the task, the agent, the policy's files. The only place that knows all rooms."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import workflows.policies
from conf.errors import ConfigError
from conf.schema import Config
from launch.targets import extend_path
from stages.layout import StoreLayout
from stages.protocols import Agent, Limits, Task
from stages.trajectory import Sampling


def build_task(config: Config) -> Task:
    """The configured Task.

    Raises:
        ConfigError: its class refused the arguments.
    """
    extend_path(config.import_path)
    arguments: dict[str, Any] = dict(config.task.options)
    target = _target(config.task._target_)
    accepted = inspect.signature(target).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    for name, value in (("path", config.task.path), ("limit", config.task.limit)):
        if value is not None and (name in accepted or open_ended):
            arguments[name] = value
        elif value is not None:
            raise ConfigError(
                f"task.{name} got {value!r}, but {config.task._target_} takes no {name}; allowed: null",
                key=f"task.{name}",
                value=value,
            )
    if "wheels" in accepted:
        arguments.setdefault("wheels", str(StoreLayout(config.store_path).wheels))
    task: Task = _construct(target, arguments, "task")
    if not getattr(task, "name", ""):
        task.name = config.task.name
    return task


def build_agent(config: Config, task: Task) -> Agent:
    """The configured Agent; one whose constructor has a parameter `task` is given the task."""
    extend_path(config.import_path)
    arguments: dict[str, Any] = dict(config.agent.options)
    target = _target(config.agent._target_)
    if "task" in inspect.signature(target).parameters:
        arguments["task"] = task
    if "harness" in inspect.signature(target).parameters:
        arguments["harness"] = config.agent.harness
    elif config.agent.harness is not None:
        raise ConfigError(
            f"agent.harness got {config.agent.harness!r}, but {config.agent._target_} takes no harness; allowed: null",
            key="agent.harness",
            value=config.agent.harness,
        )
    if "wheels" in inspect.signature(target).parameters:
        arguments.setdefault("wheels", str(StoreLayout(config.store_path).wheels))
    agent: Agent = _construct(target, arguments, "agent")
    return agent


def gym_row() -> Any:
    """What makes NeMo Gym's rows for the router's route of that contract."""
    from workflows.export.nemo_gym import answer_row  # with pyarrow, for which no other process waits

    return answer_row


def _target(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _construct(target: Any, arguments: dict[str, Any], key: str) -> Any:
    try:
        return target(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}.options: {target.__name__} does not take them: {error}", key=f"{key}.options"
        ) from error


def model_dir(config: Config) -> Path:
    """The policy's directory: a shipped one by name, or any Hugging Face directory.

    Raises:
        ConfigError: no such directory, or one that holds no tokenizer.
    """
    name = config.fleet.model
    shipped = Path(workflows.policies.__file__).parent
    directory = shipped / name if "/" not in name and (shipped / name).is_dir() else Path(name)
    if not directory.is_dir():
        names = ", ".join(sorted(path.parent.name for path in shipped.glob("*/config.json")))
        message = f"fleet.model got {name!r}: no such directory; allowed: {names} or a Hugging Face model directory"
        raise ConfigError(message, key="fleet.model", value=name)
    return directory


def limits(config: Config) -> Limits:
    """What an agent may spend."""
    return Limits(config.agent.max_turns, config.agent.turn_timeout_s, config.budget.run_s)


def sampling(config: Config) -> Sampling:
    """The configured sampling params."""
    s = config.sampling
    return Sampling(s.temperature, s.top_p, s.max_tokens, s.seed)
