"""workflow=train: what it needs, the trainer's process, and how that is kept alive beside the run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from conf.errors import ConfigError
from conf.load import digest
from conf.schema import Config
from launch import wiring
from launch.errors import LaunchError
from launch.kinds import supervised
from launch.supervisor import BACKOFF_S, BODY, RESTART_WINDOW_S, RESTARTS
from stages import sharedfs
from stages.layout import RunLayout

if TYPE_CHECKING:
    from launch.bodies import Context
    from workflows.train.records import Record

END_S: Final = 10.0


class TrainerFailedError(LaunchError):
    """The trainer's process cannot be kept alive; the message quotes the last thing it said."""


def check(config: Config) -> None:
    """What can be wrong with training before anything is started.

    Raises:
        ConfigError: torch is missing, the rollouts' log-probs would not be those of the policy that is trained, or
            the task takes no such arguments.
    """
    if config.workflow.name != "train":
        return
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "workflow=train needs torch: install it beside rollmill with `uv pip install 'rollmill[train]'` (on a "
            "machine without GPUs add `--torch-backend cpu`)",
            key="workflow",
        )
    sampling = config.sampling
    if sampling.temperature == 0:
        raise ConfigError("sampling.temperature got 0: greedy rollouts of a group are all alike", key="sampling")
    if sampling.top_p != 1 or sampling.logprobs != "processed":
        raise ConfigError(
            "workflow=train needs sampling.top_p=1 and sampling.logprobs=processed: ratios are taken of whole "
            f"distributions; got {sampling.top_p} and {sampling.logprobs}",
            key="sampling",
        )
    if config.group_size < 2:
        raise ConfigError("group_size got 1: workflow=train compares the rollouts of a group; give 2 or more")
    wanted, most = config.train.groups * config.group_size, config.admission.max_open
    if wanted > most:
        raise ConfigError(
            f"train.groups got {config.train.groups}: with group_size={config.group_size} an update takes {wanted} "
            f"rollouts; allowed: at most admission.max_open={most}",
            key="train.groups",
            value=config.train.groups,
        )
    if config.train.mode == "async" and config.policy.max_lag == 0:
        raise ConfigError(
            "policy.max_lag got 0: with train.mode=async rollouts are one version old; allowed: 1 or more, or null",
            key="policy.max_lag",
            value=0,
        )
    heldout_tasks(config)


async def trainer(context: Context) -> None:
    """The trainer's process: trains to the end and leaves its report."""
    from stages.chat import ChatTokenizer
    from stages.client import AsyncRolloutClient
    from stages.shards import ShardReader
    from workflows.policies.learner import Learner
    from workflows.train.learning import Rules
    from workflows.train.loop import Plan, Trainer
    from workflows.train.objective import Clip

    config = context.config
    settings, sampling = config.train, config.sampling
    is_dapo = settings.algorithm == "dapo"
    clip = Clip(settings.clip, settings.clip_higher if is_dapo else settings.clip)
    rules = Rules(
        sampling.temperature, settings.learning_rate, clip, is_dapo, settings.weight_cap, settings.kl
    )  # fmt: skip
    directory = wiring.model_dir(config)
    plan = Plan(
        context.layout.root, context.run_id, config.group_size, config.seed,
        {"temperature": sampling.temperature, "top_p": 1.0, "max_tokens": sampling.max_tokens, "seed": config.seed},
        config.admission.max_open, config.fs.visibility_s,
    )  # fmt: skip
    task_ids = [row["task_id"] for row in wiring.build_task(config).rows()]
    work = Trainer(
        settings, plan, Learner(directory, rules, settings.threads), ChatTokenizer.load(directory), task_ids,
        heldout_tasks(config),
    )  # fmt: skip
    async with AsyncRolloutClient(context.layout.root, patience_s=config.stuck_after_s) as client:
        with ShardReader(context.layout.root, visibility_s=config.fs.visibility_s) as reader:
            state = await work.to_the_end(client, reader)
    await asyncio.to_thread(_leave_report, context, state.records)


def heldout_tasks(config: Config) -> list[dict[str, object]]:
    """The held-out problems with their rows, since the run serves others; empty where none are named.

    Raises:
        ConfigError: the task takes no such arguments, or they would give rows that are trained on.
    """
    settings = config.train.heldout
    if not settings.options:
        return []
    options = {**config.task.options, **settings.options}
    path = options.pop("path", None)
    if config.task.path is not None and (path is None or Path(path).resolve() == Path(config.task.path).resolve()):
        raise ConfigError(
            f"train.heldout.options.path got {path!r}: held-out problems would be the rows of task.path that are "
            "trained on; allowed: a file of other problems (+train.heldout.options.path=FILE), or none at all "
            "(~train.heldout.options)",
            key="train.heldout.options",
            value=path,
        )
    task = dataclasses.replace(config.task, options=options, path=path, limit=settings.problems)
    rows = wiring.build_task(dataclasses.replace(config, task=task)).rows()
    return [{"task_id": row["task_id"], "data": dict(row)} for row in rows]


def _leave_report(context: Context, records: Sequence[Record]) -> None:
    from workflows.train.plots import picture
    from workflows.train.records import Places
    from workflows.train.report import summary

    config, places = context.config, Places(context.layout.root)
    about = {
        "run_id": context.run_id, "config_digest": digest(config), "model": config.fleet.model, "seed": config.seed,
        "settings": dataclasses.asdict(config.train),
    }  # fmt: skip
    made = summary(records, **about)
    settings = config.train
    title = f"{settings.algorithm}, {settings.mode}, seed {config.seed}, from {config.fleet.model}"
    drawn = picture([(title, records)], title)
    if drawn is not None:
        sharedfs.write_atomic(places.picture, drawn)
    sharedfs.write_atomic(places.report, msgspec.json.format(msgspec.json.encode(made), indent=2))


async def keep_training(layout: RunLayout, attempt: int, say: Callable[[str], None]) -> str:
    """Run the trainer's process until it is through; started again when it dies. Returns its report for people.

    Raises:
        TrainerFailedError: it cannot be kept alive, does not get any further, or found its configuration wrong.
    """
    from workflows.train.records import Places
    from workflows.train.report import lines

    deaths: list[float] = []
    in_vain, version = 0, await asyncio.to_thread(_version, layout)
    while (code := await _run_once(layout, attempt)) != 0:
        deaths = [t for t in deaths if t > time.monotonic() - RESTART_WINDOW_S] + [time.monotonic()]
        reached = await asyncio.to_thread(_version, layout)
        in_vain, version = in_vain + 1 if reached <= version else 0, reached
        words = await asyncio.to_thread(_last_words, layout, attempt)
        if code > 0 or len(deaths) > RESTARTS:
            raise TrainerFailedError(f"trainer-1 ended with exit code {code}: {words}")
        if in_vain > RESTARTS:
            raise TrainerFailedError(f"trainer-1 died {in_vain} times without getting past version {version}: {words}")
        say(f"trainer-1 ended with signal {-code}; started again")
        await asyncio.sleep(min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** (len(deaths) - 1)))
    places = Places(layout.root)
    made = msgspec.json.decode(await asyncio.to_thread(sharedfs.read_bytes, places.report))
    drawn = places.picture if await asyncio.to_thread(sharedfs.exists, places.picture) else "none: no matplotlib"
    return lines(made) + f"curves    {places.table}\npicture   {drawn}\n"


def _version(layout: RunLayout) -> int:
    """The last version that counts; one that cannot be read is for the trainer to complain about."""
    from workflows.errors import TrainError
    from workflows.train.records import Places, read_state

    try:
        state = read_state(Places(layout.root))
    except TrainError:
        return 0
    return state.version if state is not None else 0


async def _run_once(layout: RunLayout, attempt: int) -> int:
    """One life of the process; its exit code. Whoever stops waiting takes it along."""
    with (layout.attempt_logs(attempt) / "trainer-1.log").open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", BODY, "trainer", str(layout.root), "1", stdin=asyncio.subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True, env=supervised(),
        )  # fmt: skip
    try:
        return await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await asyncio.shield(process.wait())
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _last_words(layout: RunLayout, attempt: int) -> str:
    log = layout.attempt_logs(attempt) / "trainer-1.log"
    said = [line for line in log.read_text(errors="replace").splitlines() if line]
    ours = [line for line in said if line.startswith("rollmill: ")]
    return (ours or said or ["it said nothing"])[-1].removeprefix("rollmill: ")
