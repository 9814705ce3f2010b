"""The cheats are real: a grader that believes what it sees pays each, ours pays insiders where it has no canaries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.protocols import SandboxBackend
from stages.protocols import Reward
from stages.trajectory import Trajectory
from tests.support import swe_instance as small
from tests.support.cheats import play
from tests.support.cheats.swe import INSIDERS
from workflows.tasks.swe import SweTask, grading

ALL = [*small.FAIL_TO_PASS, *small.PASS_TO_PASS]
SOME_OF_SWE = ["sitecustomize", "ld-so-preload", "git-hooks", "runner-patched", "looks-in-frame", "tests-symlinked"]
"""All of them: `python -m tests.support.cheats naive swe`."""

Play = Callable[[SandboxBackend, Path, Iterable[str]], Awaitable[dict[str, set[str]]]]


@pytest.mark.parametrize(("play_all", "names"), [(play.play_code, play.CODE), (play.play_swe, SOME_OF_SWE)])
def test_a_naive_grader_pays_every_cheat_and_not_what_is_plainly_wrong(
    tmp_path: Path, play_all: Play, names: list[str]
) -> None:
    async def scenario() -> dict[str, set[str]]:
        async with BubblewrapBackend(tmp_path) as backend:
            return await play_all(backend, tmp_path, [play.NOTHING, "honest", *names])

    signs = asyncio.run(scenario())
    assert [name for name, seen in signs.items() if not seen] == [play.NOTHING]
    assert signs["honest"] >= {"exit", "printed"}


async def _stay() -> None:
    """In place of a reset: what the first run of the tests has changed is there in the second."""


def _unwatched(heard: grading.Heard) -> grading.Heard:
    heard.patched, heard.ended = [], True
    return heard


def test_an_insider_is_paid_where_what_it_was_written_against_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, everything = grading.judge, frozenset(grading.function_of(one) for one in ALL)
    first: list[grading.Canaries] = []
    monkeypatch.setattr(grading, "draw", lambda tests: (first[-1], frozenset()))
    monkeypatch.setattr(
        grading, "judge", lambda tests, runs: judge(tests, [(names, _unwatched(heard)) for names, heard in runs])
    )

    async def scenario() -> dict[str, Reward]:
        task = SweTask(str(small.write(tmp_path, [small.row()])))
        (row,), rewards = task.rows(), {}
        async with BubblewrapBackend(tmp_path) as backend:
            spec = await play.prepared(backend, tmp_path)
            for name in sorted(INSIDERS):
                first.append(everything if "second-run" in name else frozenset())
                async with backend.create(spec) as sandbox:
                    await play.leave(sandbox, name)
                    monkeypatch.setattr(sandbox, "reset", _stay)
                    rewards[name] = await task.verify(sandbox, row, Trajectory([], []))
        return rewards

    assert {name: reward.value for name, reward in asyncio.run(scenario()).items()} == dict.fromkeys(INSIDERS, 1.0)
