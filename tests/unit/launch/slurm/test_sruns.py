"""The steps of a job as processes: their ends, their words, and how they are ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.slurm import sruns
from launch.slurm.sruns import Steps, parse_steps
from stages.layout import RunLayout
from tests.support import runs
from tests.support.waiting import eventually

HEARS = "while read -r word; do echo $word >> $0; done"


def shell(script: str, *words: str) -> list[str]:
    return ["sh", "-c", script, *words]


async def test_each_end_is_told_once_and_none_is_missed() -> None:
    steps = Steps({"a": shell("exit 3"), "b": shell("exit 4"), "c": shell("read -r word; exit 5")})
    await steps.start(1)
    await eventually(lambda: steps.over("a") and steps.over("b"), "two ended while nobody looked")
    assert {await steps.next_end(), await steps.next_end()} == {"a", "b"}
    assert await steps.next_end(timeout_s=0.01) is None
    steps.terminate("c")
    assert await steps.next_end() == "c"
    assert [steps.code(name) for name in steps.names] == [3, 4, 5]
    await steps.end(1.0)


async def test_an_event_comes_before_an_end() -> None:
    steps, event = Steps({"a": shell("read -r word")}), asyncio.Event()
    await steps.start(1)
    event.set()
    assert await steps.next_end(event) is None
    await steps.end(1.0)


async def test_words_reach_a_step_and_its_environment_says_the_attempt(tmp_path: Path) -> None:
    said = tmp_path / "said"
    steps = Steps({"a": shell(f"echo $ROLLMILL_ATTEMPT $EXTRA >> $0; {HEARS}", str(said))})
    await steps.start(7, {"EXTRA": "x"})
    steps.drain()
    await eventually(lambda: said.exists() and said.read_text() == "7 x\ndrain\n", "the word is heard")
    await steps.end(0.0)


async def test_what_does_not_end_when_asked_is_terminated_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sruns, "KILL_S", 0.1)
    steps = Steps({"polite": shell("exec sleep 60"), "deaf": shell("trap '' TERM; echo; while :; do sleep 1; done")})
    await steps.start(1)
    pids = [process.pid for process in steps._running.values()]
    await steps.end(0.2)
    assert steps.code("polite") == 128 + 15
    assert steps.code("deaf") in {128 + 9, 128 + 15}
    assert runs.alive(pids) == []


async def test_waiting_for_a_step_has_a_bound() -> None:
    steps = Steps({"a": shell("exec sleep 60")})
    await steps.start(1)
    assert await steps.wait("a", 0.05) == 128 + 15
    assert await steps.wait("a", 0.05) == 128 + 15


def test_only_steps_of_ours_are_started() -> None:
    line = "srun --nodes=1 python -P -u -m launch.slurm.step /run run run=2,1-2 --output=attempt_$ROLLMILL_ATTEMPT/x"
    assert parse_steps(line, 3)["run"][-1] == "--output=attempt_3/x"
    with pytest.raises(LaunchError, match="step that is none"):
        parse_steps("rm -rf /shared", 1)
    with pytest.raises(LaunchError, match="submit the run again"):
        parse_steps("srun python -m launch.slurm.step /run", 1)


def test_last_words_are_ours_and_of_this_attempt(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    for attempt, said in ((1, "rollmill: old\n"), (2, "noise\nrollmill: first\nrollmill: last\nTraceback\n")):
        layout.attempt_logs(attempt).mkdir(parents=True)
        (layout.attempt_logs(attempt) / "run-node0.log").write_text(said)
    assert Steps.last_words("run", layout, 2) == "last"
    assert Steps.last_words("fleet", layout, 2) == "it said nothing"
