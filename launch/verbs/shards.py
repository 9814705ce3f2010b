"""`rollmill shards`: reads every committed row, which checks its bytes; `shards compact` seals them in Parquet."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from launch.errors import CommandError, Exit
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser


def run(name: str, args: Sequence[str]) -> int:
    """Print counts as one JSON object, or the first rows as JSON lines; `compact` first rewrites an ended run."""
    if args and args[0] == "compact":
        return _compact(name, args[1:])
    parser = verb_parser(name)
    parser.add_argument("--head", type=_count, metavar="N", help="print the first N rows as JSON, one a line")
    parser.add_argument(
        "--after", type=_count, default=0, metavar="SEQ", help="only what follows this seq of the index"
    )
    parser.add_argument("--tag", help="only the rows of this tag")
    chosen = parser.parse_args(args)
    run_dir = find_run_dir(chosen.run_dir)
    from conf.load import load_config
    from stages.shards import ShardReader, row_to_json

    visibility_s = load_config(run_dir).fs.visibility_s
    with ShardReader(run_dir, after=chosen.after, tag=chosen.tag, visibility_s=visibility_s) as reader:
        if chosen.head is None:
            sys.stdout.write(json.dumps(_counted(reader)) + "\n")
            return Exit.DONE
        for row in itertools.islice((row for row in reader if row.batch is not None), chosen.head):
            sys.stdout.write(json.dumps(row_to_json(row)) + "\n")
    return Exit.DONE


def _compact(name: str, args: Sequence[str]) -> int:
    """Rewrite the committed rows to Parquet and say what it came to."""
    parser = verb_parser(name)
    parser.add_argument("--force", action="store_true", help="although a worker's file says that it may still write")
    chosen = parser.parse_args(args)
    run_dir = find_run_dir(chosen.run_dir)
    from stages.errors import StageError
    from stages.shards.compact import compact

    try:
        done = compact(run_dir, force=chosen.force)
    except (StageError, OSError) as error:
        raise CommandError(str(error)) from error
    sys.stdout.write(
        f"{run_dir}: {done.rollouts} rollouts in {done.files} Parquet files, {done.bytes} bytes; "
        f"{done.shards} shards of {done.shard_bytes} bytes removed\n"
    )
    return Exit.DONE


def _counted(rows: Any) -> dict[str, Any]:
    """Counts over an iterable of ShardRow, whose columns are all read on the way."""
    statuses: Counter[str] = Counter()
    files: set[str] = set()
    totals: Counter[str] = Counter(rollouts=0, chains=0, tokens=0, sampled_tokens=0)
    rewards = []
    for row in rows:
        statuses[row.line.status] += 1
        totals["rollouts"] += 1
        totals["chains"] += len(row.chains)
        if row.line.shard is not None:
            files.add(row.line.shard)
        for chain in row.chains:
            totals["tokens"] += len(chain["token_ids"])
            totals["sampled_tokens"] += sum(chain["loss_mask"])
        if row.line.reward is not None:
            rewards.append(row.line.reward)
    mean = sum(rewards) / len(rewards) if rewards else None
    return {**totals, "status": dict(statuses), "reward_mean": mean, "files": len(files)}


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value
