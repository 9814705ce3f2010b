"""`rollmill journal`: the ledger's events as they stand on disk."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from launch.errors import Exit
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser


def run(name: str, args: Sequence[str]) -> int:
    """Print events, one line each, or how many there are of each type."""
    parser = verb_parser(name)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object a line, as journaled")
    shape.add_argument("--stats", action="store_true", help="how many events of each type, as one JSON object")
    chosen = parser.parse_args(args)
    run_dir = find_run_dir(chosen.run_dir)
    from stages.journal.history import read_events
    from stages.layout import RunLayout
    from stages.ledger import events

    counts: Counter[str] = Counter()
    for event in read_events(RunLayout(run_dir)):
        if chosen.json:
            sys.stdout.write(events.encode(event).decode() + "\n")
        elif chosen.stats:
            counts[events.as_dict(event)["type"]] += 1
        else:
            sys.stdout.write(event_line(events.as_dict(event)) + "\n")
    if chosen.stats:
        sys.stdout.write(json.dumps({"events": counts.total(), "types": dict(counts.most_common())}) + "\n")
    return Exit.DONE


def event_line(fields: dict[str, Any]) -> str:
    """One event for people: time, type, the rest as key=value, long values cut."""
    rest = {key: value for key, value in fields.items() if key not in ("t", "type")}
    when = datetime.fromtimestamp(fields["t"], UTC).strftime("%H:%M:%S.%f")[:-3]
    shown = " ".join(f"{key}={_short(value)}" for key, value in rest.items())
    return f"{when} {fields['type']:<16} {shown}".rstrip()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 120 else text[:117] + "..."
