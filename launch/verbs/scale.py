"""`rollmill scale`: more workers of a pool while the run goes on, or fewer of those that were added."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence

from launch.errors import CommandError, Exit
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser

_CHANGE = re.compile(r"pools\.(init|run|eval)=([+-]\d+)")


def run(name: str, args: Sequence[str]) -> int:
    """Submit or end linked jobs.

    Raises:
        CommandError: no such change, or the run is not on a cluster.
        LaunchError: Slurm refused or was not reached.
    """
    parser = verb_parser(name)
    parser.add_argument("change", metavar="POOL", help="pools.run=+4, pools.eval=-2 and the like")
    chosen = parser.parse_args(args)
    match = _CHANGE.fullmatch(chosen.change)
    if match is None or int(match[2]) == 0:
        raise CommandError(f"got {chosen.change!r}; wanted pools.{{init,run,eval}}=+N or =-N, such as pools.run=+4")
    from conf.load import load_config
    from launch.slurm.elastic import scale
    from stages.layout import RunLayout

    run_dir = find_run_dir(chosen.run_dir)
    config = load_config(run_dir)
    if config.placement.name == "local":
        raise CommandError(f"{run_dir} runs with placement=local: its workers are counted by pools.*.workers")
    said = asyncio.run(scale(config, RunLayout(run_dir), match[1], int(match[2])))  # type: ignore[arg-type]
    sys.stdout.write(f"{run_dir}: {said}\n")
    return Exit.DONE
