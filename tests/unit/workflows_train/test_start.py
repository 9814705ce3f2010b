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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.groups=12", "admission.max_open=95"), "train.groups got 12: .* takes 96 rollouts; .*max_open=95"),
        (("train.mode=async", "policy.max_lag=0"), "policy.max_lag got 0: with train.mode=async"),
    ],
)
def test_limits_that_no_update_could_keep_are_refused(torch: None, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(learn(*overrides))


def test_limits_that_an_update_just_keeps_are_taken(torch: None) -> None:
    check(learn("train.groups=12", "admission.max_open=96", "task.limit=4"))
    check(learn("train.mode=async", "policy.max_lag=1", "task.limit=4"))
    check(learn("policy.max_lag=0", "task.limit=4"))


def test_with_a_file_of_problems_the_held_out_ones_have_a_file_of_their_own(torch: None, tmp_path: Path) -> None:
    for name in ("train", "other"):
        (tmp_path / name).write_text(f'{{"task_id":"{name}","question":"What is 1 + 1?","answer":2}}\n')
    given, path = f"task.path={tmp_path / 'train'}", "+train.heldout.options.path="
    for override in ("train.heldout.problems=8", f"{path}{tmp_path / '..' / tmp_path.name / 'train'}"):
        with pytest.raises(ConfigError, match=r"train\.heldout\.options\.path got .*that are trained on"):
            check(learn(given, override))
    check(learn(given, "~train.heldout.options"))
    for config in (learn(given, f"{path}{tmp_path / 'other'}"), learn(f"{path}{tmp_path / 'other'}")):
        check(config)
        assert [task["task_id"] for task in heldout_tasks(config)] == ["other"]


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


async def test_a_trainer_that_is_killed_now_and_then_and_gets_nowhere_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "RESTART_WINDOW_S", -1.0)  # every death is the only one of its window
    monkeypatch.setattr(training, "BACKOFF_S", (0.0, 0.0))
    monkeypatch.setattr(training, "RESTARTS", 2)
    state = (
        "(root / 'train').mkdir(exist_ok=True); life = len(lives.read_text())\n"
        "(root / 'train' / 'state.json').write_text('{\"v\":1,\"version\":%d}' % min(life, 4))\n"
    )
    layout = script(tmp_path, monkeypatch, f"{LIVES}{state}assert life < 9; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(TrainerFailedError, match="died 3 times without getting past version 4"):
        await keep_training(layout, 1, print)
    assert len((layout.root / "lives").read_text()) == 7, "four lives made a version each"


def test_the_processes_body_needs_no_torch_to_be_named() -> None:
    from launch.bodies import BODIES
    from launch.kinds import KINDS

    assert set(BODIES) == set(KINDS) and "trainer" in KINDS
    assert "torch" not in sys.modules
