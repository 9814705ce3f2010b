"""`rollmill doctor`: what this machine and user can do, what to ask for, and what a run directory can hold."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from launch.doctor import Check, can_isolate, examine
from launch.errors import CommandError, Exit
from launch.verbs.arguments import verb_parser


def run(name: str, args: Sequence[str]) -> int:
    """Print the checks; 1 where agents cannot be isolated here, or the run directory cannot hold a run."""
    parser = verb_parser(name)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="node-local directory; default: TMPDIR, else /tmp")
    chosen = parser.parse_args(args)
    scratch: Path = (chosen.scratch or Path(tempfile.gettempdir())) / f"rollmill-{os.getuid()}"
    try:
        found = examine(
            scratch, None if chosen.run_dir is None else Path(chosen.run_dir).absolute(),
            told=lambda text: None if chosen.json else print(f"{text} ...", file=sys.stderr),  # noqa: T201 - for people
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"{scratch}: {error.strerror}: give a directory of yours as --scratch") from error
    fit = can_isolate(found["machine"]) and all(c.ok or not c.needed for checks in found.values() for c in checks)
    if chosen.json:
        shown = {about: [asdict(check) for check in checks] for about, checks in found.items()}
        sys.stdout.write(json.dumps({"v": 1, "ok": fit, "checks": shown}) + "\n")
    else:
        sys.stdout.write(text_of(found))
    return Exit.DONE if fit else Exit.FAILED


def text_of(found: Mapping[str, Sequence[Check]]) -> str:
    """The checks for people, a line each, and what to ask for below."""
    lines = []
    for about, checks in found.items():
        lines.append(f"{about}:")
        lines += [f"  {'ok ' if check.ok else 'no '} {check.name:<18} {check.found}" for check in checks]
    asked = [check for checks in found.values() for check in checks if not check.ok and check.ask]
    if asked:
        lines.append("what is missing, and what to ask for:")
        lines += [f"  {check.name:<22} {check.ask}" for check in asked]
    return "\n".join(lines) + "\n"
