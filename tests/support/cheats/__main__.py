"""All cheats by hand: `python -m tests.support.cheats {naive|graded} {code|swe} [bubblewrap|apptainer]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from stages.shards import ShardReader
from tests.integration.sandbox.grounds import backend_named
from tests.support import problems, runs
from tests.support import swe_instance as small
from tests.support.cheats import code, play, swe


async def _naive(kind: str, backend: str, scratch: Path) -> int:
    """Every cheat must be paid by the naive grader, plainly wrong work must not."""
    played, names = {"code": (play.play_code, play.CODE), "swe": (play.play_swe, play.SWE)}[kind]
    async with backend_named(backend, scratch) as made:
        signs = await played(made, scratch, [play.NOTHING, "honest", *names])
    for name, seen in signs.items():
        print(f"{name:36} {' '.join(sorted(seen)) or '-'}")
    weak = [name for name, seen in signs.items() if bool(seen) == (name == play.NOTHING)]
    print(f"{kind} {backend}: {len(names) - len(weak)} of {len(names)} cheats fool a naive grader; weak: {weak}")
    return len(weak)


def _graded(kind: str, backend: str, scratch: Path) -> int:
    """Every cheat must score 0 by a real run, honest work 1."""
    names = ["honest", *(code.NAMES if kind == "code" else swe.CHEATS)]
    if kind == "code":
        data, agent = problems.write(scratch / "rows.jsonl", problems.named(names)), "code.Cheat"
        patience = "task.options.call_s=2"
    else:
        data, agent = small.write(scratch, [small.row(name) for name in names]), "swe.CheatingAgent"
        patience = "task.options.test_s=20"
    done = runs.run(
        scratch / "run", f"task={kind}", "task.limit=null", f"sandbox={backend}", f"task.path={data}", "group_size=1",
        f"agent._target_=tests.support.cheats.{agent}", patience, timeout_s=900,
    )  # fmt: skip
    print(done.stderr[-500:] if done.returncode else "", end="")
    rewards = {row["task_id"]: (row["reward"], row["status"]) for row in ShardReader(scratch / "run")}
    wrong = {name: rewards.get(name) for name in names if rewards.get(name) != (float(name == "honest"), "completed")}
    print(f"{kind} {backend}: {len(names) - 1 - len(wrong)} of {len(names) - 1} cheats score 0; wrong: {wrong}")
    return len(wrong)


def main() -> int:
    """The number of those that are not as they should be."""
    how, kind, backend = (*sys.argv[1:], "bubblewrap")[:3]
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        return _graded(kind, backend, scratch) if how == "graded" else asyncio.run(_naive(kind, backend, scratch))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
