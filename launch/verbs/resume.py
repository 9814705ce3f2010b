"""`rollmill resume`: carries a dead or interrupted run on from the config that it was launched with."""

from __future__ import annotations

from collections.abc import Sequence

from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser


def run(name: str, args: Sequence[str]) -> int:
    """Act as the launch did; the result of a run that has ended is shown again.

    Raises:
        CommandError: no run directory.
        ConfigError: its config.yaml cannot be read.
    """
    chosen = verb_parser(name).parse_args(args)
    run_dir = find_run_dir(chosen.run_dir)
    from conf.load import load_config
    from launch.start import act

    return act(load_config(run_dir))
