"""The verbs of the command line: name, module that does it, one sentence."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from conf.errors import ConfigError


@dataclass(frozen=True)
class Verb:
    """One verb; `module` holds `run(args) -> int`, or is None for a verb that a later version brings."""

    name: str
    sentence: str
    module: str | None = None


VERBS: tuple[Verb, ...] = (
    Verb("status", "where the run stands; --json for programs", "launch.verbs.status"),
    Verb("top", "the live display of a run somewhere else"),
    Verb("logs", "paths and last lines of the processes' logs; --follow, --stage, --attempt", "launch.verbs.logs"),
    Verb("cancel", "end the run now; what is open is cancelled", "launch.verbs.control"),
    Verb("drain", "take no new rollouts, finish what is leased, then end", "launch.verbs.control"),
    Verb("resume", "carry a dead or interrupted run on from its own config", "launch.verbs.resume"),
    Verb("scale", "add workers to a pool while the run goes on, or end added ones: pools.run=+4", "launch.verbs.scale"),
    Verb("report", "tables and curves of a run"),
    Verb("export", "write the rows in another format: --format jsonl|parquet -o PATH", "launch.verbs.export"),
    Verb("shards", "read every committed row, check it, and count; --head N prints some", "launch.verbs.shards"),
    Verb("journal", "the ledger's events; --json for programs, --stats for counts", "launch.verbs.journal"),
    Verb("images", "sandbox images: build, import, list, verify, prune, and prefetch of wheels", "launch.verbs.images"),
    Verb("doctor", "what this machine and user can do, and what to ask the administrator for", "launch.verbs.doctor"),
)


def verb_names() -> tuple[str, ...]:
    """All verbs, those that are not built yet too."""
    return tuple(verb.name for verb in VERBS)


def run_verb(name: str, args: Sequence[str]) -> int:
    """Run one verb and return its exit code.

    Raises:
        ConfigError: the verb is not built yet.
    """
    verb = next(verb for verb in VERBS if verb.name == name)
    if verb.module is None:
        raise ConfigError(f"rollmill {name} is not built yet", key=name)
    code = importlib.import_module(verb.module).run(name, list(args))
    return int(code)
