"""How workflow=train starts: what it refuses before anything is made, what it measures on, and how it is kept alive."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.schema import Config
from launch import training
from launch.compose import compose
from launch.training import TrainerFailedError, check, heldout_tasks, keep_training
from stages.layout import RunLayout
from workflows.tasks import sums


def learn(*overrides: str) -> Config:
    return compose(["experiment=learn", *overrides]).config


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))


def test_without_torch_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torch: .*rollmill\[train\]"):
        check(learn())
    check(learn("workflow=collect"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.temperature=0", "all alike"),
        ("sampling.top_p=0.9", "whole distributions"),
        ("sampling.logprobs=raw", "whole distributions"),
        ("group_size=1", "2 or more"),
        ("task=math", "does not take them"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(torch: None, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(learn(override))


def test_the_experiment_is_accepted_and_measures_on_the_other_split(torch: None) -> None:
    config = learn("train.heldout.problems=40", "task.limit=300")
    check(config)
    tasks: Any = heldout_tasks(config)
    assert len(tasks) == 40 and len({task["task_id"] for task in tasks}) == 40
    for task in tasks:
        numbers = task["data"].get("files", {}).get(sums.NUMBERS_PATH, "")
        assert sums.split_of(sums.expression_of(task["data"]["question"], numbers)) == "heldout"
    assert heldout_tasks(replace(config, train=replace(config.train, heldout=type(config.train.heldout)()))) == []


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> RunLayout:
    """Puts a module in the trainer's place, which counts its lives in a file."""
    (tmp_path / "stand_in.py").write_text(
        f"import os, pathlib, signal, sys\nroot = pathlib.Path(sys.argv[2])\n{text}\n"
    )
    monkeypatch.setattr(training, "BODY", "stand_in")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    layout = RunLayout(tmp_path / "run")
    layout.attempt_logs(1).mkdir(parents=True)
    return layout


LIVES = "lives = root / 'lives'\nlives.write_text((lives.read_text() if lives.exists() else '') + 'x')\n"


async def test_a_trainer_that_is_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = (
        "from workflows.train import report; import json\n"
        "(root / 'report').mkdir(); (root / 'report' / 'train.json').write_text(json.dumps(report.summary([])))"
    )
    text = f"{LIVES}if len(lives.read_text()) < 3: os.kill(os.getpid(), signal.SIGKILL)\n{report}"
    layout, said = script(tmp_path, monkeypatch, text), list[str]()
    assert "not measured" in await keep_training(layout, 1, said.append)
    assert said == ["trainer-1 ended with signal 9; started again"] * 2


async def test_a_trainer_that_fails_by_itself_ends_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{LIVES}print('rollmill: trainer-1: no such weights', file=sys.stderr); sys.exit(1)"
    layout = script(tmp_path, monkeypatch, text)
    with pytest.raises(TrainerFailedError, match="exit code 1: trainer-1: no such weights"):
        await keep_training(layout, 1, print)
    assert (layout.root / "lives").read_text() == "x"


def test_the_processes_body_needs_no_torch_to_be_named() -> None:
    from launch.bodies import BODIES
    from launch.process import KINDS

    assert set(BODIES) == set(KINDS) and "trainer" in KINDS
    assert "torch" not in sys.modules
