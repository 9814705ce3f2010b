"""From overrides to a plan or a run: compose, resolve, validate, then the action that was asked for."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from conf.load import validate
from conf.schema import Config
from launch.compose import compose, expand, swept_keys
from launch.errors import CommandError, Exit
from launch.failures import describe
from launch.plan import plan_text
from launch.resolve import at_point, resolve
from launch.targets import locate

Point = tuple[str, str, int]
"""What tells a point of a sweep from the others, its run directory, its exit code."""


def launch(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> int:
    """Compose one configuration and act on it; returns the exit code.

    Raises:
        ConfigError: a key or value is wrong; nothing was started and nothing created.
        CommandError: the action does not go with the placement.
    """
    composed = compose(overrides, config_dirs).config
    config = resolve(composed, cwd=Path.cwd(), now=datetime.now(), token=secrets.token_hex(2))
    return act(_prepared(config, config_dirs))


def sweep(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> int:
    """Compose every point of a sweep first, then act on each; a point's failure does not hide the others.

    Returns the highest exit code of all points.

    Raises:
        ConfigError: any point is wrong; nothing was started.
    """
    points = expand(overrides)
    now, token, cwd = datetime.now(), secrets.token_hex(2), Path.cwd()
    numbered = "run_dir" not in swept_keys(overrides)
    configs = []
    for place, point in enumerate(points):
        composed = compose(point, config_dirs).config
        if numbered:
            config = at_point(composed, composed.run_dir, place, cwd=cwd, now=now, token=token)
        else:
            config = resolve(composed, cwd=cwd, now=now, token=token)
        configs.append(_prepared(config, config_dirs))
    ended = act_on_all(configs, [_differences(point, overrides) for point in points], act)
    if any(config.action != "plan" for config in configs):
        from launch.progress import print_points

        print_points(ended)
    return max(code for _, _, code in ended)


def act_on_all(configs: Sequence[Config], labels: Sequence[str], act: Callable[[Config], int]) -> list[Point]:
    """Act on every point in order; one that fails says so in one line, and the others go on."""
    points = []
    for config, label in zip(configs, labels, strict=True):
        try:
            code = act(config)
        # The boundary of one point: whatever broke it, the other points are runs of their own.
        except Exception as error:  # noqa: BLE001 - see above
            message, code = describe(error)
            sys.stderr.write(f"rollmill: {label}: {message}\n")
        points.append((label, config.run_dir or "", int(code)))
    return points


def _prepared(config: Config, config_dirs: Sequence[Path]) -> Config:
    validate(config)
    if config.action == "submit" and config.placement.name == "local":
        raise CommandError("action=submit needs a cluster; placement=local runs at once: use action=run")
    return locate(config, _search(config_dirs))


def _search(config_dirs: Sequence[Path]) -> list[Path]:
    """Where a user's own packages may lie: in a config directory, beside it, or in the working directory."""
    places = []
    for directory in config_dirs:
        places += [directory.absolute(), directory.absolute().parent]
    return list(dict.fromkeys([*places, Path.cwd()]))


def act(config: Config) -> int:
    """Do what a resolved configuration asks for; returns the exit code."""
    if config.action == "plan":
        sys.stdout.write(plan_text(config))
        return Exit.DONE
    if config.workflow.name == "train":
        from launch.training import check

        check(config)
    if config.workflow.name == "evaluate" and config.evaluate.run_dir is not None:
        from launch.evaluation import evaluate_as_guest

        return int(asyncio.run(evaluate_as_guest(config)))
    if config.placement.name == "local":
        from launch.local import run_local

        return int(asyncio.run(run_local(config)))
    from launch.slurm.submit import submit_run

    return int(asyncio.run(submit_run(config)))


def _differences(point: Sequence[str], overrides: Sequence[str]) -> str:
    """What tells this point from the others: its overrides that were swept."""
    fixed = set(overrides)
    return " ".join(text for text in point if text not in fixed) or "the only point"
