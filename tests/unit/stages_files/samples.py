"""Rollouts for the tests of the run's files: fixed ones, drawn ones, and a run directory that holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from stages import sharedfs
from stages.layout import RunLayout
from stages.shards.index import GroupLine, IndexLine, RowsLine
from stages.shards.index_writer import IndexWriter
from stages.shards.schema import min_policy_version
from stages.shards.writer import ShardWriter
from stages.trajectory import (
    Chain,
    Message,
    ModelIdentity,
    Row,
    RowRange,
    RunResult,
    Sampling,
    Timing,
    Trajectory,
    Turn,
    VersionSpan,
)


def make_layout(root: Path) -> RunLayout:
    layout = RunLayout(root / "run")
    for directory in layout.directories:
        sharedfs.make_dirs(directory)
    return layout


def make_chain(tokens: int = 6, prompt: int = 2, version: int = 3) -> Chain:
    sampled = tokens - prompt
    return Chain.of(
        prompt_length=prompt,
        token_ids=list(range(100, 100 + tokens)),
        loss_mask=[0] * prompt + [1] * sampled,
        logprobs=[0.0] * prompt + [-0.5] * sampled,
        policy_versions=[VersionSpan(version, prompt, tokens)] if sampled else [],
        turns=[Turn(prompt, tokens, "stop", "replica-0", 0, 0.25, 0.5)] if sampled else [],
    )


def make_row(number: int, chains: Sequence[Chain] | None = None, group: str = "g0", tag: str = "") -> Row:
    return Row(
        run_id="run",
        rollout_id=f"r{number}",
        group_id=group,
        task_id=f"t{number}",
        tag=tag,
        attempt=1,
        workflow="collect",
        task="arith",
        agent="tools",
        model=ModelIdentity("tiny", "d1", "d2", "d3"),
        status="completed",
        failure_class=None,
        mask_sample=False,
        mask_reason=None,
        reward=1.0,
        reward_parts={"answer": 1.0, "format": 0.5},
        grading="trusted",
        trajectory=Trajectory([make_chain()] if chains is None else list(chains), [Message("user", "2 + 2 = ?")]),
        sampling=Sampling(seed=number),
        timing=Timing(run_s=1.5, total_s=2.5),
        nodes=["n1", "n2"],
        slurm_job_id=None,
        layer_digests=["ab", "cd"],
        infrastructure_attempts=0,
        created_at=1_700_000_000.25,
        finished_at=1_700_000_002.75,
    )


def make_result(number: int, workspace: bytes | None = None) -> RunResult:
    return RunResult(
        rollout_id=f"r{number}",
        group_id="g0",
        task_id=f"t{number}",
        attempt=1,
        outcome="ok",
        message="",
        trajectory=Trajectory([make_chain()], [Message("user", "hello")]),
        sampling=Sampling(),
        model=ModelIdentity("tiny"),
        node="n1",
        run_s=1.0,
        llm_s=0.5,
        tool_s=0.25,
        finished_at=2.0,
        workspace=workspace,
    )


def rows_line(seq: int, row: Row, place: RowRange | None) -> RowsLine:
    return RowsLine(
        seq=seq,
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        task_id=row.task_id,
        tag=row.tag,
        status=row.status,
        failure_class=row.failure_class,
        reward=row.reward,
        mask_sample=row.mask_sample,
        min_policy_version=min_policy_version(row.trajectory),
        shard=place.path if place else None,
        offset=place.offset if place else None,
        length=place.length if place else None,
        crc32=place.crc32 if place else None,
        chains=max(1, len(row.trajectory.chains)) if place else 0,
    )


def group_line(seq: int, group: str, rollout_ids: list[str], tag: str = "") -> GroupLine:
    return GroupLine(
        seq=seq, group_id=group, tag=tag, closed_by="complete", usable=len(rollout_ids), rollout_ids=rollout_ids
    )


def write_rows(layout: RunLayout, rows: Sequence[Row], member: str = "eval-1-3f9a") -> list[RowRange]:
    """Write all rows at once through one ShardWriter and return their ranges."""

    async def write() -> list[RowRange]:
        async with ShardWriter(layout, member) as writer:
            return list(await asyncio.gather(*(writer.append(row) for row in rows)))

    return asyncio.run(write())


def publish(layout: RunLayout, lines: Sequence[IndexLine], epoch: int = 1, after: int = 0) -> None:
    with IndexWriter(layout, epoch, after) as index:
        index.open()
        index.publish(lines)


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_TOKEN = st.integers(0, 2**31 - 1)
_LOGPROB = st.floats(-1e6, 0, width=32)
_SECONDS = st.floats(0, 1e6)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    tokens = draw(st.lists(_TOKEN, max_size=12))
    size = len(tokens)
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    return Chain.of(
        prompt_length=draw(st.integers(0, size)),
        token_ids=tokens,
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)),
        logprobs=draw(st.lists(_LOGPROB, min_size=size, max_size=size)),
        policy_versions=[VersionSpan(draw(st.integers(0, 2**62)), start, end) for start, end in spans],
        turns=[
            Turn(start, end, draw(_TEXT), draw(_TEXT), draw(st.integers(0, 9999)), draw(_SECONDS), draw(_SECONDS))
            for start, end in spans
        ],
    )


@st.composite
def rows(draw: st.DrawFn) -> Row:
    return Row(
        run_id=draw(_TEXT),
        rollout_id=draw(st.uuids().map(str)),
        group_id=draw(_TEXT),
        task_id=draw(_TEXT),
        tag=draw(_TEXT),
        attempt=draw(st.integers(0, 100)),
        workflow=draw(_TEXT),
        task=draw(_TEXT),
        agent=draw(_TEXT),
        model=ModelIdentity(draw(_TEXT), draw(_TEXT), draw(_TEXT), draw(_TEXT)),
        status=draw(st.sampled_from(["completed", "failed", "cancelled"])),
        failure_class=draw(st.none() | _TEXT),
        mask_sample=draw(st.booleans()),
        mask_reason=draw(st.none() | _TEXT),
        reward=draw(st.none() | st.floats(-1e9, 1e9)),
        reward_parts=draw(st.dictionaries(_TEXT, st.floats(-1e9, 1e9), max_size=3)),
        grading=draw(st.sampled_from(["trusted", "untrusted"])),
        trajectory=Trajectory(
            draw(st.lists(chains(), max_size=3)),
            [Message("user", draw(_TEXT))],
            draw(st.sampled_from(["processed", "raw"])),
        ),
        sampling=Sampling(
            draw(_SECONDS), draw(_SECONDS), draw(st.integers(1, 9999)), draw(st.none() | st.integers(0, 2**63 - 1))
        ),
        timing=Timing(*(draw(_SECONDS) for _ in range(9))),
        nodes=draw(st.lists(_TEXT, max_size=3)),
        slurm_job_id=draw(st.none() | _TEXT),
        layer_digests=draw(st.lists(_TEXT, max_size=3)),
        infrastructure_attempts=draw(st.integers(0, 9)),
        created_at=draw(st.integers(0, 4_000_000_000)) + 0.5,
        finished_at=draw(st.integers(0, 4_000_000_000)) + 0.25,
        artifacts=draw(st.none() | _TEXT),
    )
