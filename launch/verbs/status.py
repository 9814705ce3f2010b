"""`rollmill status`: where a run stands, from its router or, when that cannot be reached, from its files."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from launch.errors import Exit
from launch.figures import STAGES, snapshot
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser


def run(name: str, args: Sequence[str]) -> int:
    """Print the status."""
    parser = verb_parser(name)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    chosen = parser.parse_args(args)
    run_dir = find_run_dir(chosen.run_dir)
    from stages.status import fetch_status

    status = asyncio.run(fetch_status(run_dir))
    sys.stdout.write(json.dumps(status) + "\n" if chosen.json else status_text(status))
    return Exit.DONE


def status_text(status: Mapping[str, Any]) -> str:
    """A status document for people."""
    now = snapshot(status)
    lines = [
        f"run      {status.get('run_id', 'unknown')}: {now.state}",
        f"rollouts {now.ended} of {now.accepted} ended: {now.completed} completed, {now.failed} failed, "
        f"{now.cancelled} cancelled",
        *(f"{stage:<8} {now.queued[stage]} queued, {now.leased[stage]} leased" for stage in STAGES),
    ]
    if now.reward_mean is not None:
        lines.append(f"reward   {now.reward_mean:.4f} mean")
    lines += [_replica(item) for item in status.get("fleet") or () if isinstance(item, Mapping)]
    members = Counter(str(item.get("kind")) for item in status.get("members") or () if isinstance(item, Mapping))
    if members:
        lines.append("members  " + ", ".join(f"{count} {kind}" for kind, count in sorted(members.items())))
    if now.stuck:
        lines.append(f"stuck    {now.stuck}")
    return "\n".join(lines) + "\n"


def _replica(replica: Mapping[str, Any]) -> str:
    state, sessions = replica.get("state", ""), replica.get("sessions", 0)
    said = f"replica  {replica.get('id')} {state} at {replica.get('url')}, {sessions} sessions"
    return f"{said} ({replica['reason']})" if replica.get("reason") else said
