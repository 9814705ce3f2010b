"""Before anything of a run is started, wherever it will run: its parts are checked and its run directory opened."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import msgspec

from conf.load import digest, dump_config
from conf.schema import Config
from launch import wiring
from launch.errors import Exit
from launch.progress import print_summary
from stages import control, manifest, sharedfs
from stages.chat import ChatTokenizer
from stages.engine.weights import load_model_files
from stages.layout import RunLayout
from stages.router.auth import make_secrets
from stages.shards.writer import write_schema
from stages.summary import read_summary


async def check_parts(config: Config) -> None:
    """Everything that can be wrong before anything is made: the model, the task, the agent.

    Raises:
        ConfigError: names the key.
        StageError: the model's files cannot be used.
    """
    directory = wiring.model_dir(config)
    await asyncio.to_thread(ChatTokenizer.load, directory)
    if config.fleet.name == "embedded":
        await asyncio.to_thread(load_model_files, directory)
    wiring.build_agent(config, wiring.build_task(config))


async def open_run(config: Config, layout: RunLayout) -> manifest.Opened:
    """Make the run directory, or find out how the run in it stands.

    Raises:
        ManifestError: the directory is another config's, holds something else, or cannot be written.
    """
    return await asyncio.to_thread(manifest.open_run, layout, dump_config(config), digest(config), version("rollmill"))


def furnish(layout: RunLayout, *, keep_summary: bool = False) -> None:
    """Put in place what the processes of a start expect, and take away what an earlier start was asked for and left.

    Args:
        layout: the run directory.
        keep_summary: the earlier start's result stays, for a start that may be refused yet; see `drop_summary`.
    """
    make_secrets(layout)
    write_schema(layout)
    if not keep_summary:
        sharedfs.unlink(layout.summary)
    control.clear(layout)


def drop_summary(layout: RunLayout, left: dict[str, Any] | None) -> None:
    """Take an earlier start's result away, unless what has been started meanwhile has already left its own."""
    if left is not None and read_summary(layout) == left:
        sharedfs.unlink(layout.summary)


def show_finished(layout: RunLayout) -> int:
    """Print the result of a run that has ended; returns its exit code."""
    summary: dict[str, Any] = msgspec.json.decode(sharedfs.read_bytes(layout.summary))
    print_summary(summary, layout.root)
    return Exit.DONE if summary["state"] == "completed" else Exit.INTERRUPTED
