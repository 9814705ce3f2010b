"""What shards cost beside JSON lines: writing with fsync, scanning, one rollout by its id, bytes a token."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from stages import sharedfs
from stages.layout import RunLayout
from stages.shards import ShardReader
from stages.shards.compact import compact
from stages.shards.index import RowsLine
from stages.shards.index_writer import IndexWriter
from stages.shards.writer import ShardWriter
from stages.trajectory import (
    Chain,
    Message,
    ModelIdentity,
    Row,
    RowRange,
    Sampling,
    Timing,
    Trajectory,
    Turn,
    VersionSpan,
)
from tests.bench.report import emit

GROUP = 64
"""Trajectories between two fsyncs, on every side."""
VOCABULARY = 151_936
DISTINCT = 256
TURNS = 8
FILE_BYTES = 256 << 20
COLUMNS = ("token_ids", "loss_mask", "logprobs")


@dataclass(frozen=True)
class Size:
    """How much is written, and how many rows the slow side is scanned and asked for."""

    trajectories: int
    tokens: int
    scanned: int
    asked: int


FULL, QUICK = Size(10_000, 8192, 2_000, 400), Size(512, 2048, 256, 64)


def make_chain(rng: np.random.Generator, tokens: int) -> Chain:
    """A chain as agents leave them: an eighth of prompt, then turns of which seven tenths are sampled.

    Token ids are log-uniform (Zipf's law) over a vocabulary of today's size; log-probs are drawn from a gamma
    distribution of shape 0.3, so that half of them are near 0 and all have full mantissas.
    """
    prompt, turn = tokens // 8, (tokens - tokens // 8) // TURNS
    mask = np.zeros(tokens, np.uint8)
    turns = []
    for start in range(prompt, prompt + turn * TURNS, turn):
        end = start + turn * 7 // 10
        mask[start:end] = 1
        turns.append(Turn(start, end, "stop", "replica-0", 0, 0.25, 0.5))
    ids = np.exp(rng.random(tokens) * np.log(VOCABULARY)).astype("<i4")
    logprobs = np.where(mask == 1, -rng.gamma(0.3, 1.0, tokens), 0.0).astype("<f4")
    spans = [VersionSpan(3, turns[0].start, turns[-1].end)]
    return Chain(prompt, ids.tobytes(), mask.tobytes(), logprobs.tobytes(), spans, turns)


def make_row(number: int, chain: Chain) -> Row:
    return Row(
        run_id="bench", rollout_id=f"r{number:08d}", group_id=f"g{number // 8:06d}", task_id=f"t{number // 8:06d}",
        tag="", attempt=1, workflow="collect", task="swe", agent="tools", model=ModelIdentity("m", "a", "b", "c"),
        status="completed", failure_class=None, mask_sample=False, mask_reason=None, reward=float(number % 2),
        reward_parts={"tests": 1.0}, grading="trusted", trajectory=Trajectory([chain], [Message("user", "x" * 256)]),
        sampling=Sampling(seed=number), timing=Timing(run_s=1.5, total_s=2.5), nodes=["n1"], slurm_job_id="17",
        layer_digests=["ab"], infrastructure_attempts=0, created_at=1.75e9, finished_at=1.75e9 + 2,
    )  # fmt: skip


def as_lists(row: Row) -> dict[str, Any]:
    """The row as a JSON writer holds it: numbers in lists."""
    chain = row.trajectory.chains[0]
    plain: dict[str, Any] = msgspec.to_builtins(row)
    del plain["trajectory"]
    names = ("prompt_length", "token_ids", "loss_mask", "logprobs")
    turns, spans = msgspec.to_builtins(chain.turns), msgspec.to_builtins(chain.policy_versions)
    return plain | {name: getattr(chain, name) for name in names} | {"turns": turns, "policy_versions": spans}


def groups(count: int) -> Iterator[range]:
    for start in range(0, count, GROUP):
        yield range(start, min(start + GROUP, count))


async def write_shards(layout: RunLayout, chains: list[Chain], count: int) -> tuple[list[RowRange], float]:
    """Ranges of all rows, and seconds of writing."""
    places: list[RowRange] = []
    spent = 0.0
    async with ShardWriter(layout, "eval-1") as writer:
        for numbers in groups(count):
            rows = [make_row(number, chains[number % len(chains)]) for number in numbers]
            started = time.perf_counter()
            places += await asyncio.gather(*(writer.append(row) for row in rows))
            spent += time.perf_counter() - started
    return places, spent


def publish(layout: RunLayout, places: list[RowRange]) -> None:
    lines = []
    for number, place in enumerate(places):
        row = make_row(number, Chain.of(0, (), (), ()))
        lines.append(
            RowsLine(
                seq=number + 1,
                rollout_id=row.rollout_id,
                group_id=row.group_id,
                task_id=row.task_id,
                tag="",
                status="completed",
                failure_class=None,
                reward=row.reward,
                mask_sample=False,
                min_policy_version=3,
                shard=place.path,
                offset=place.offset,
                length=place.length,
                crc32=place.crc32,
                chains=1,
            )
        )
    with IndexWriter(layout, 1, 0) as index:
        index.publish(lines)


def write_jsonl(path: Path, chains: list[Chain], count: int) -> tuple[list[tuple[int, int]], float]:
    """(offset, length) of all lines, and seconds of writing; one write and one fsync a group, as the shards have."""
    kept = [as_lists(make_row(0, chain)) for chain in chains]
    places: list[tuple[int, int]] = []
    spent, end = 0.0, 0
    with path.open("wb", buffering=0) as file:
        for numbers in groups(count):
            rows = [kept[number % len(kept)] | {"rollout_id": f"r{number:08d}"} for number in numbers]
            started = time.perf_counter()
            lines = [orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows]
            file.write(b"".join(lines))
            os.fsync(file.fileno())
            spent += time.perf_counter() - started
            for line in lines:
                places.append((end, len(line)))
                end += len(line)
    return places, spent


def json_arrays(line: bytes) -> int:
    row = orjson.loads(line)
    ids, mask = np.array(row["token_ids"], np.int32), np.array(row["loss_mask"], np.uint8)
    return len(ids) + len(mask) + len(np.array(row["logprobs"], np.float32))


def scan_shards(run_dir: Path) -> tuple[int, float]:
    """Values in arrays, and seconds; every batch's crc is checked on the way."""
    started, values = time.perf_counter(), 0
    with ShardReader(run_dir) as reader:
        for row in reader:
            (chain,) = row.chains
            values += sum(len(chain.array(name).to_numpy()) for name in COLUMNS)
    return values, time.perf_counter() - started


def scan_jsonl(path: Path, rows: int) -> float:
    started = time.perf_counter()
    with path.open("rb") as file:
        for _, line in zip(range(rows), file, strict=False):
            json_arrays(line)
    return time.perf_counter() - started


def ask_shards(run_dir: Path, count: int) -> list[float]:
    """Seconds of each rollout by id, all of them once in random order, the batches' crcs among them."""
    order = random.Random(7).sample(range(count), count)
    seconds = []
    with ShardReader(run_dir) as reader:
        reader.get("")  # reads the index, as a JSON reader reads its offsets
        for number in order:
            started = time.perf_counter()
            row = reader.get(f"r{number:08d}")
            assert row is not None
            (chain,) = row.chains
            for name in COLUMNS:
                chain.array(name).to_numpy()
            seconds.append(time.perf_counter() - started)
    return seconds


def ask_jsonl(path: Path, places: list[tuple[int, int]], asked: int) -> list[float]:
    seconds = []
    with path.open("rb") as file:
        for offset, length in random.Random(7).sample(places, asked):
            started = time.perf_counter()
            json_arrays(os.pread(file.fileno(), length, offset))
            seconds.append(time.perf_counter() - started)
    return seconds


def measure(root: Path, size: Size, errors: list[str]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    layout = RunLayout(root / "run")
    for directory in layout.directories:
        sharedfs.make_dirs(directory)
    rng = np.random.default_rng(11)
    chains = [make_chain(rng, size.tokens) for _ in range(min(DISTINCT, size.trajectories))]
    tokens, count = size.trajectories * size.tokens, size.trajectories

    places, wrote_s = asyncio.run(write_shards(layout, chains, count))
    publish(layout, places)
    files = sorted({place.path for place in places})
    total = sum(layout.resolve(name).stat().st_size for name in files)
    lines, json_wrote_s = write_jsonl(root / "rows.jsonl", chains, count)

    values, scanned_s = scan_shards(layout.root)
    if values != 3 * tokens:
        errors.append(f"scan: {values} values in arrays, not {3 * tokens}")
    json_scanned_s = scan_jsonl(root / "rows.jsonl", size.scanned)
    asked, json_asked = ask_shards(layout.root, count), ask_jsonl(root / "rows.jsonl", lines, size.asked)
    if len(files) > -(-total // FILE_BYTES):
        errors.append(f"{len(files)} files for {total} bytes: more than one a {FILE_BYTES} bytes")

    started = time.perf_counter()
    counted = compact(layout.root)
    compacted_s = time.perf_counter() - started
    values, sealed_scan_s = scan_shards(layout.root)
    if values != 3 * tokens:
        errors.append(f"scan of the compacted run: {values} values in arrays, not {3 * tokens}")

    rate = {"write": count / wrote_s, "scan": count / scanned_s, "random": count / sum(asked)}
    theirs = {
        "write": count / json_wrote_s,
        "scan": size.scanned / json_scanned_s,
        "random": len(json_asked) / sum(json_asked),
    }
    results = {
        "write_mb_per_s": total / wrote_s / 1e6, "read_mb_per_s": total / scanned_s / 1e6,
        "random_p50_ms": statistics.median(asked) * 1e3, "random_p99_ms": sorted(asked)[len(asked) * 99 // 100] * 1e3,
        "bytes_per_token": total / tokens, "parquet_bytes_per_token": counted.bytes / tokens, "files": len(files),
        "compact_mb_per_s": total / compacted_s / 1e6, "parquet_read_mb_per_s": total / sealed_scan_s / 1e6,
        **{f"{name}_rows_per_s": value for name, value in rate.items()},
    }  # fmt: skip
    json_bytes = (root / "rows.jsonl").stat().st_size
    peer = {f"{name}_rows_per_s": value for name, value in theirs.items()} | {"bytes_per_token": json_bytes / tokens}
    return results, peer, {f"{name}_x_jsonl": rate[name] / theirs[name] for name in rate}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--directory", help="where to write; default: the system's temporary directory")
    given = parser.parse_args(arguments)
    errors: list[str] = []
    with tempfile.TemporaryDirectory(dir=given.directory) as scratch:
        results, peer, ratios = measure(Path(scratch), QUICK if given.quick else FULL, errors)
    return emit("shards", results, peers={"jsonl_orjson": peer}, ratios=ratios, errors=errors, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
