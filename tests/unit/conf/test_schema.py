"""Every key: it is explained, it survives a file, and what it refuses is named with its full key."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.convert import field_types, plain, structure
from conf.errors import ConfigError
from conf.explain import Key, find, keys
from conf.load import digest, dump_config, load_config, parse_config, validate
from conf.schema import Config, Fleet, Lease, Sampling, Task

LEAVES = [key for key in keys() if not key.section]

POOL = "workers slots nodes cpus_per_task mem_gib partition account qos time_min"
CONTRACT = {
    "": "run_dir store seed group_size tag stuck_after_s",
    "task": "path limit",
    "pools.init": f"{POOL} ready_buffer",
    "pools.run": POOL,
    "pools.eval": POOL,
    "pools.run.autoscale": "max queue idle_s partition",
    "fleet": "model replicas gpus_per_replica urls policy nodes partition account qos cpus_per_task mem_gib time_min",
    "control": "partition cpus_per_task mem_gib",
    "sampling": "temperature top_p max_tokens seed logprobs",
    "agent": "max_turns turn_timeout_s harness",
    "budget": "init_s run_s eval_s",
    "retry": "max_attempts",
    "lease": "ttl_s heartbeat_s",
    "admission": "max_open",
    "checkpoint": "turns",
    "fs": "visibility_s",
    "policy": "max_lag",
    "compat": "prorl nemo_gym",
    "cluster": "account qos partition constraint reservation exclude nice clusters setup scratch interface continue_by "
    "max_requeues het_max_nodes het_max_pending_s max_submissions_per_hour shapes extra_sbatch "
    "changed_code",
    "shards": "messages",
    "callbacks": "allow",
    "evaluate": "run_dir k priority tag",
}
CONTRACT_KEYS = [f"{section}.{word}".strip(".") for section, words in CONTRACT.items() for word in words.split()]


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return typing.cast("dict[str, Any]", value)


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def hint_of(key: Key) -> Any:
    cls: Any = Config
    *path, last = key.name.split(".")
    for name in path:
        cls = field_types(cls)[name]
    return field_types(cls)[last]


def other_value(hint: Any) -> Any:
    """A value that the type allows and that no key has as its default."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return other_value(args[0])
    if origin is typing.Literal:
        return args[-1]
    if origin is list:
        return [other_value(args[0])]
    if origin is dict:
        return {"name": 1}
    if origin is not None:
        return other_value(next(arg for arg in args if arg is not type(None)))
    return {int: 17, float: 0.75, str: "word", bool: True}[hint]


def test_every_key_of_the_contract_exists() -> None:
    assert [name for name in CONTRACT_KEYS if find(name) is None] == []


def test_every_key_is_explained_in_a_sentence() -> None:
    assert [key.name for key in keys() if not key.sentence.endswith(".")] == []


@pytest.mark.parametrize("key", LEAVES, ids=lambda key: key.name)
def test_each_key_parses_and_survives_a_file(key: Key) -> None:
    value = other_value(hint_of(key))
    config = structure(Config, nested(key.name, value))
    assert at(config, key.name) == value
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize("key", LEAVES, ids=lambda key: key.name)
def test_each_key_refuses_another_type_by_its_full_name(key: Key) -> None:
    wrong = "word" if typing.get_origin(hint_of(key)) in (list, dict) else {"a": 1}
    with pytest.raises(ConfigError) as caught:
        structure(Config, nested(key.name, wrong))
    assert caught.value.key == key.name
    assert str(caught.value).startswith(f"{key.name} got ")
    assert "\n" not in str(caught.value)


def test_the_defaults_are_a_valid_configuration() -> None:
    validate(Config())


BAD = [
    ("seed: abc", "seed got 'abc' (text); allowed: a whole number >= 0"),
    ("seed: -1", "seed got -1 (a whole number); allowed: a whole number >= 0"),
    ("group_size: 0", "group_size got 0 (a whole number); allowed: a whole number >= 1"),
    ("group_size: true", "group_size got True (true or false)"),
    ("group_size: 1.5", "group_size got 1.5 (a number); allowed: a whole number"),
    ("sampling: {temperature: -0.1}", "sampling.temperature got -0.1"),
    ("sampling: {temperature: .nan}", "sampling.temperature got nan"),
    ("sampling: {top_p: 0}", "sampling.top_p got 0 (a whole number); allowed: a number > 0 and <= 1"),
    ("sampling: {top_p: 1.01}", "sampling.top_p got 1.01"),
    ("sampling: {logprobs: both}", "sampling.logprobs got 'both' (text); allowed: processed, raw"),
    ("stuck_after_s: .inf", "stuck_after_s got inf; allowed: a finite number"),
    ("stuck_after_s: 0", "stuck_after_s got 0 (a whole number); allowed: a number > 0"),
    ("pools: {run: {slots: 0}}", "pools.run.slots got 0"),
    ("pools: {runs: {slots: 1}}", "pools.runs is not a key: did you mean pools.run"),
    ("retry: {max_atempts: 2}", "retry.max_atempts is not a key: did you mean retry.max_attempts?"),
    ("task: arith", "task got 'arith' (text); allowed: a mapping of keys"),
    ("task: {name: a/b}", "task.name got 'a/b' (text); allowed: letters, digits"),
    ('tag: "a\\nb"', "tag got 'a\\nb' (text); allowed: one line of text"),
    ("fleet: {model: ''}", "fleet.model got '' (text); allowed: one line of text, not empty"),
    ("fleet: {urls: [ftp://x], name: external}", "fleet.urls got 'ftp://x'; allowed: http:// or https:// URLs"),
    ("fleet: {urls: [http://x]}", "fleet.urls got ['http://x']; allowed: none unless fleet=external"),
    ("fleet: {name: external}", "fleet.urls got []; allowed: at least one URL with fleet=external"),
    ("cluster: {exclude: node1}", "cluster.exclude got 'node1' (text); allowed: a list"),
    ("cluster: {exclude: [null]}", "cluster.exclude[0] got null"),
    ("lease: {ttl_s: 10, heartbeat_s: 5}", "lease.heartbeat_s got 5; allowed: below 5, half of lease.ttl_s=10"),
    ("admission: {max_open: 2}", "group_size got 4; allowed: at most admission.max_open=2"),
    (
        "evaluate: {priority: 101}",
        "evaluate.priority got 101 (a whole number); allowed: a whole number >= 0 and <= 100",
    ),
    ("[1, 2]", "the configuration got [1, 2] (a list)"),
    ("a: [", "config.yaml is not YAML"),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=lambda text: text[:40])
def test_bad_input_is_one_line_with_the_full_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(parse_config(text))
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_number_is_taken_as_text_where_text_is_wanted() -> None:
    assert parse_config("cluster: {account: 1234}").cluster.account == "1234"


def test_a_whole_number_is_taken_as_a_number() -> None:
    ttl_s = parse_config("lease: {ttl_s: 40}").lease.ttl_s
    assert (ttl_s, type(ttl_s)) == (40.0, float)


@given(
    options=st.dictionaries(
        st.text(min_size=1),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ),
    ),
    tag=st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"])),
    temperature=st.floats(0, 100),
)
def test_any_options_and_text_survive_a_file(options: dict[str, Any], tag: str, temperature: float) -> None:
    config = replace(
        Config(), task=Task(options=options), tag=tag, sampling=Sampling(temperature=temperature), run_dir="/runs/one"
    )
    assert parse_config(dump_config(config)) == config
    assert digest(parse_config(dump_config(config))) == digest(config)


def test_a_run_directory_that_moved_is_still_the_same_run(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "elsewhere" / "new"
    for place in (old, new):
        place.mkdir(parents=True)
        (place / "config.yaml").write_text(dump_config(replace(Config(), run_dir=str(old))))
    first, second = load_config(old), load_config(new / "config.yaml")
    assert second.run_path == new
    assert second.store_path == new.parent / "store"
    assert digest(first) == digest(second)


@pytest.mark.parametrize(
    "key", [k for k in LEAVES if k.name not in ("run_dir", "action", "import_path")], ids=lambda k: k.name
)
def test_every_key_that_defines_the_run_changes_the_digest(key: Key) -> None:
    base = replace(Config(), run_dir="/runs/one")
    other = not key.default if isinstance(key.default, bool) else other_value(hint_of(key))
    changed = structure(Config, {**plain(base), **nested_into(plain(base), key.name, other)})
    assert changed != base
    assert digest(changed) != digest(base)


def nested_into(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    return {name: value if not rest else {**data[name], **nested_into(data[name], rest, value)}}


@pytest.mark.parametrize(
    "change", [{"action": "plan"}, {"import_path": ["/mine"]}, {"run_dir": "/runs/two"}, {"store": "/runs/store"}]
)
def test_where_and_how_one_looks_at_it_does_not_change_the_digest(change: dict[str, Any]) -> None:
    base = replace(Config(), run_dir="/runs/one")
    assert digest(replace(base, **change)) == digest(base)


def test_unreadable_and_missing_files_say_which(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_text("nope: 1")
    with pytest.raises(ConfigError, match=r"config\.yaml: nope is not a key"):
        load_config(tmp_path)


def test_a_config_object_of_the_wrong_values_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"lease\.ttl_s got -1"):
        validate(replace(Config(), lease=Lease(ttl_s=-1.0)))
    with pytest.raises(ConfigError, match=r"fleet\.replicas got 0"):
        validate(replace(Config(), fleet=Fleet(replicas=0)))


def test_worker_processes_load_a_config_without_hydra(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(Config()))
    script = (
        "import sys; from pathlib import Path; from conf.load import load_config; load_config(Path(sys.argv[1])); "
        "assert not {'hydra', 'omegaconf', 'numpy', 'msgspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", script, str(tmp_path)], check=True, timeout=60)


def test_all_schema_classes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lease.ttl_s = 1.0  # type: ignore[misc]
