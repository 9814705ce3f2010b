"""Composition: the defaults are the schema's, every wrong override is one line, sweeps expand to their product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.choices import GROUPS
from conf.errors import ConfigError
from conf.schema import Agent, Config, Task
from launch.compose import compose, expand, group_choices, swept_keys
from launch.help import shipped_choices

ARITH = {"seed": 0, "split": "train", "file_fraction": 0.33}


def refusal(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dirs)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_the_composed_default_is_the_schemas_default() -> None:
    composed = compose([])
    assert replace(composed.config, task=Task()) == Config()
    assert composed.config.task == Task(options=ARITH)
    assert composed.choices["experiment"] is None


def test_the_runs_seed_is_the_tasks_seed_unless_it_has_its_own() -> None:
    assert compose(["seed=7"]).config.task.options["seed"] == 7
    assert compose(["seed=7", "task.options.seed=1"]).config.task.options["seed"] == 1


@pytest.mark.parametrize(
    ("group", "choice"),
    [(group, choice) for group in GROUPS for choice in shipped_choices(group) if choice != "own"],
)
def test_every_shipped_choice_composes(group: str, choice: str) -> None:
    if group != "experiment":
        config = compose([f"{group}={choice}"]).config
        assert getattr(config, group).name == choice
    else:
        assert compose([f"{group}={choice}"]).choices["experiment"] == choice


def test_the_demo_is_what_it_says() -> None:
    config = compose(["experiment=demo"]).config
    assert (config.run_dir, config.task.limit, config.group_size, config.fleet.model) == ("runs/demo", 64, 4, "tiny")
    assert compose(["experiment=demo", "group_size=2"]).config.group_size == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task=arit", "task got arit; allowed: arith, code, harbor, math, own, stem, swe; did you mean arith?"),
        ("task=null", "task got null; allowed: arith"),
        ("task=[a,b]", "task=[a,b] cannot be used"),
        ("+task=arith", "+task=arith cannot be used"),
        ("tsk=arith", "tsk is not a key: did you mean task?"),
        ("retry.max_atempts=2", "retry.max_atempts is not a key: did you mean retry.max_attempts?"),
        ("+retry.max_atempts=2", "retry.max_atempts is not a key"),
        ("max_turns=3", "max_turns is not a key: did you mean agent.max_turns?"),
        ("zzzz=1", "zzzz is not a key; rollmill --help lists them all"),
        ("retry=3", "retry holds keys and takes no value itself; set one of retry.max_attempts"),
        ("retry.max_attempts=0", "retry.max_attempts got 0 (a whole number); allowed: a whole number >= 1"),
        ("retry.max_attempts=abc", "retry.max_attempts got 'abc' (text); allowed: a whole number >= 1"),
        ("retry.max_attempts=null", "retry.max_attempts got null (nothing)"),
        ("sampling.temperature=-1", "sampling.temperature got -1"),
        ("tag=true", "tag got True (true or false); allowed: one line of text"),
        ("tag=???", "tag is missing; give it a value: tag=..."),
        ("tag=${nope}", "tag: Interpolation key 'nope' not found"),
        ('tag="a', "tag got '\"a', which cannot be read"),
        ("seed=1,2", "seed=1,2 is a sweep; add -m to run every point"),
        ("seed", "'seed' is neither key=value nor a verb"),
        ("~seed", "seed cannot be removed; allowed: a whole number >= 0"),
        ("experiment=foo", "experiment got foo; allowed: demo"),
        ("hydra.run.dir=x", "hydra.run.dir is not a key here"),
        ("agent=own", "agent._target_ got null (nothing); allowed: one line of text, not empty"),
        ("hydra.searchpath=[/x]", "hydra.searchpath got '/x'; allowed: a list of file://DIR and pkg://PACKAGE"),
        ("fleet.urls=http://a", "fleet.urls got 'http://a' (text); allowed: a list"),
        ("task.options=3", "task.options got 3 (a whole number); allowed: a mapping of keys"),
    ],
)
def test_a_wrong_override_is_one_line(override: str, said: str) -> None:
    assert refusal(override).startswith(said)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_class_of_ones_own_gets_its_own_options_and_nobody_elses(plus: str) -> None:
    config = compose(["task._target_=my_pkg.MyTask", f"{plus}task.options.x=1"]).config
    assert config.task == Task(_target_="my_pkg.MyTask", name="own", limit=None, options={"x": 1})
    agent = compose(["agent._target_=my_pkg.MyAgent", "agent.max_turns=3"]).config.agent
    assert agent == Agent(_target_="my_pkg.MyAgent", name="own", max_turns=3)


def test_a_subclass_of_ours_keeps_the_options_when_the_choice_is_named() -> None:
    config = compose(["task=arith", "task._target_=my_pkg.MyArith", "~task.options.split"]).config
    assert config.task.options == {"seed": 0, "file_fraction": 0.33}


def test_choices_of_ones_own_directory(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("_target_: my_pkg.MyTask\nname: mine\noptions: {depth: 2}\n")
    (tmp_path / "experiment" / "night.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /task: mine\ngroup_size: 16\n"
    )
    config = compose(["experiment=night"], [tmp_path]).config
    assert (config.task.name, config.task.options, config.group_size) == ("mine", {"depth": 2}, 16)
    assert "mine" in group_choices([tmp_path])["task"]
    by_key = compose([f"hydra.searchpath=[file://{tmp_path}]", "experiment=night"]).config
    assert by_key == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# @package _global_\nretry: {max_atempts: 2}\n", "retry.max_atempts is not a key: did you mean retry.max"),
        ("# @package _global_\nlease: {ttl_s: soon}\n", "lease.ttl_s got 'soon' (text); allowed: a number > 0"),
        (
            "# @package _global_\ndefaults:\n  - override /task: nope\n",
            "composition failed: In 'config': Could not find 'task/nope'",
        ),
        ("a: [\n", "composition failed: "),
    ],
)
def test_wrong_files_of_ones_own_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(text)
    assert refusal("experiment=bad", config_dirs=(tmp_path,)).startswith(said)


def test_a_config_dir_that_is_not_there(tmp_path: Path) -> None:
    assert "is not a directory" in refusal(config_dirs=(tmp_path / "nope",))


def test_a_sweep_is_the_product_of_its_axes_in_order() -> None:
    assert expand(["seed=1,2", "task=arith", "tag=choice(a,b)", "group_size=range(1,4,2)"]) == [
        [f"seed={seed}", "task=arith", f"tag={tag}", f"group_size={size}"]
        for seed in (1, 2)
        for tag in ("a", "b")
        for size in (1, 3)
    ]
    assert swept_keys(["seed=1,2", "task=arith", "tag=choice(a,b)"]) == ["seed", "tag"]


def test_a_sweep_over_quoted_and_plus_values_composes() -> None:
    points = expand(["tag='a, b',c", "+task.options.x=1,2"])
    tags = [(compose(point).config.tag, compose(point).config.task.options["x"]) for point in points]
    assert tags == [("a, b", 1), ("a, b", 2), ("c", 1), ("c", 2)]


def test_no_sweep_is_one_point_and_an_interval_is_none() -> None:
    assert expand(["seed=1"]) == [["seed=1"]]
    with pytest.raises(ConfigError, match=r"sampling\.top_p=interval\(0,1\) has no list of points"):
        expand(["sampling.top_p=interval(0,1)"])
