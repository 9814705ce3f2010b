"""What must hold after a run, whatever was done to it: one sentence for each thing that does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stages.errors import StageError
from stages.shards import ShardReader
from tests.support import runs


def violations(run_dir: Path, tasks: int, group_size: int) -> list[str]:
    """Everything that is wrong with a run that has ended."""
    try:
        return [*_counts(run_dir, tasks * group_size), *_replay(run_dir), *_groups(run_dir, tasks, group_size),
                *_readable(run_dir), *_left_over(run_dir)]  # fmt: skip
    except (StageError, OSError, ValueError, KeyError) as error:
        return [f"the run directory does not read: {type(error).__name__}: {error}"]


def outcome(run_dir: Path) -> dict[str, int]:
    """How a run's rollouts ended, and what it cost."""
    counts = runs.replayed(run_dir).state.counts
    return {
        "accepted": counts.accepted, "completed": counts.completed, "failed": counts.failed,
        "cancelled": counts.cancelled, "retries": counts.retries,
    }  # fmt: skip


def _counts(run_dir: Path, expected: int) -> Iterator[str]:
    state = runs.replayed(run_dir).state
    counts = state.counts
    ended = counts.completed + counts.failed + counts.cancelled
    if not counts.accepted == expected == ended:
        yield f"accepted {counts.accepted}, ended {ended}, asked for {expected}"
    if state.rollouts:
        yield f"{len(state.rollouts)} rollouts are open after the end: {sorted(state.rollouts)[:3]}"
    times = Counter(row["rollout_id"] for row in runs.rows(run_dir))
    if twice := [name for name, count in times.items() if count > 1]:
        yield f"{len(twice)} rollouts are in the index twice: {twice[:3]}"
    if len(times) != expected:
        yield f"the index has {len(times)} rollouts of {expected}: {expected - len(times)} are lost"
    failures = [json.loads(line)["rollout_id"] for line in (run_dir / "failures.jsonl").read_text().splitlines()]
    if len(failures) != len(set(failures)) or len(failures) != counts.failed + counts.cancelled:
        yield f"failures.jsonl has {len(failures)} lines for {counts.failed + counts.cancelled} rollouts"


def _replay(run_dir: Path) -> Iterator[str]:
    """The index is a pure function of the journal."""
    published, index = runs.published(run_dir), runs.index(run_dir)
    if published != index:
        first = next((i for i, (a, b) in enumerate(zip(published, index, strict=False)) if a != b), None)
        where = min(len(published), len(index)) if first is None else first
        yield f"the journal publishes {len(published)} lines, the index has {len(index)}; they part at line {where + 1}"


def _groups(run_dir: Path, tasks: int, group_size: int) -> Iterator[str]:
    lines = [line for line in runs.index(run_dir) if line["type"] == "group"]
    rows = {row["rollout_id"]: row for row in runs.rows(run_dir)}
    if len({line["group_id"] for line in lines}) != tasks or len(lines) != tasks:
        yield f"{len(lines)} groups closed of {tasks}"
    for line in lines:
        mine = [rows[name] for name in line["rollout_ids"] if name in rows]
        shape = len(line["rollout_ids"]) == len(set(line["rollout_ids"])) == len(mine) == group_size
        if not shape or any(row["group_id"] != line["group_id"] for row in mine):
            yield f"group {line['group_id']} has lost its shape: {line['rollout_ids']}"
        usable = sum(not row["mask_sample"] for row in mine)
        if usable != line["usable"]:
            yield f"group {line['group_id']} says {line['usable']} usable, its rows say {usable}"


def _readable(run_dir: Path) -> Iterator[str]:
    rows = [row for row in runs.rows(run_dir) if row["shard"] is not None]
    with ShardReader(run_dir, visibility_s=0) as reader:
        read = {row.rollout_id: row for row in reader if row.line.shard is not None}
    if len(read) != len(rows):
        yield f"{len(read)} of {len(rows)} rows that the index names were read"
    for row in rows:
        if row["status"] == "completed" and not read[row["rollout_id"]].chains:
            yield f"{row['rollout_id']} has no chains"


def _left_over(run_dir: Path) -> Iterator[str]:
    """Files of the run that nobody owns any more; node-local ones lie beside the run directory here."""
    base = run_dir.parent
    if temporary := [str(path.relative_to(base)) for path in base.rglob("*.tmp")]:
        yield f"temporary files: {temporary[:5]}"
    if members := [path.name for path in (run_dir / "members").iterdir()]:
        yield f"members that are not there: {members[:5]}"
    for place in (base / "node", base / "tmp"):
        kept = {f"{place.name}/layers"}
        scratch = [
            path for top in place.glob("rollmill-*") for path in ([top] if place.name == "tmp" else top.iterdir())
        ]
        if names := [f"{place.name}/{path.name}" for path in scratch if f"{place.name}/{path.name}" not in kept]:
            yield f"scratch directories: {sorted(names)[:5]}"
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(base) in line]
    if mounts:
        yield f"mounts: {mounts[:5]}"
