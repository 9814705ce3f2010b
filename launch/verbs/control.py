"""`rollmill cancel` and `rollmill drain`: a request left as a file, so that no port needs to be reachable."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from launch.errors import Exit
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser

_SENTENCES = {
    "cancel": "asked to cancel; what is open ends as cancelled",
    "drain": "asked to drain; what is leased is finished, nothing new is leased",
}


def run(name: str, args: Sequence[str]) -> int:
    """Leave the request; the run takes it up within seconds. Of a run on a cluster the jobs are cancelled too."""
    parser = verb_parser(name)
    if name == "cancel":
        parser.add_argument("--no-wait", action="store_true", help="return at once, also where jobs still end")
    chosen = parser.parse_args(args)
    run_dir = find_run_dir(chosen.run_dir)
    from stages.control import request

    request(run_dir, "cancel" if name == "cancel" else "drain")
    sys.stdout.write(f"{run_dir}: {_SENTENCES[name]}\n")
    if name == "cancel":
        from launch.slurm.cancelling import cancel_jobs

        said = asyncio.run(cancel_jobs(run_dir, wait=not chosen.no_wait))
        sys.stdout.writelines(f"{run_dir}: {line}\n" for line in said)
    return Exit.DONE
