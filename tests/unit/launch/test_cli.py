"""The command line as people meet it: what it prints, what it refuses and how it exits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from conf.choices import GROUPS
from conf.errors import ConfigError
from conf.explain import keys
from conf.load import parse_config
from conf.schema import Config
from launch.check import check_packages
from launch.cli import main
from launch.commands import VERBS
from launch.errors import CommandError, Exit, InstallationError
from launch.failures import describe
from launch.help import shipped_choices
from launch.start import act_on_all
from stages.errors import ManifestError
from tests.unit.launch.conftest import OWN, OWN_PACKAGE


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    captured = capsys.readouterr()
    return int(code), captured.out, captured.err


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[Config, dict[str, object]]:
    code, out, err = call(capsys, "action=plan", *OWN, *args)
    assert (code, err) == (0, "")
    document = yaml.safe_load(out)
    return parse_config(yaml.safe_dump(document["config"])), document["plan"]


def test_help_names_every_verb_group_choice_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    words = set(re.split(r"[\s,*]+", out))
    assert code == 0
    assert {verb.name for verb in VERBS} <= words
    assert {key.name for key in keys() if not key.section} <= words
    for group in GROUPS:
        assert {group, *shipped_choices(group)} <= words


def test_help_config_explains_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help-config", "lease")
    assert code == 0
    assert "lease.ttl_s = 30.0" in out
    assert "pools" not in out
    assert len(call(capsys, "--help-config")[1].splitlines()) > 250
    assert call(capsys, "--help-config=nope")[0] == 2


def test_no_arguments_show_the_help_and_start_nothing(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    assert call(capsys)[1].startswith("rollmill: rollouts as a service")
    assert not (workplace / "runs").exists()


def test_the_plan_resolves_everything_and_creates_nothing(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    config, planned = plan(
        capsys, "pools.run.workers=2", "fleet.replicas=3", "task.limit=10", "task.path=data/rows.jsonl"
    )
    assert planned["processes"] == {
        "router": {"count": 1},
        "replica": {"count": 3},
        "init": {"count": 1, "slots": 4},
        "run": {"count": 2, "slots": 32},
        "eval": {"count": 1, "slots": 8},
    }
    assert (planned["processes_total"], planned["rollouts"]) == (8, 40)
    assert planned["store"] == str(workplace / "runs" / "store")
    assert re.fullmatch(rf"{workplace}/runs/collect-MyTask-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}", str(planned["run_dir"]))
    assert config.run_dir == planned["run_dir"]
    assert config.task.path == str(workplace / "data" / "rows.jsonl")
    assert (config.action, config.task.name, config.agent.name) == ("plan", "MyTask", "MyAgent")
    assert sorted(path for path in workplace.rglob("*") if "__pycache__" not in path.parts) == before


def test_the_demos_plan(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, err = call(capsys, "action=plan", "experiment=demo")
    assert (code, err) == (0, "")
    assert out.splitlines()[:21] == [
        "plan:",
        "  placement: local",
        "  processes:",
        "    router:",
        "      count: 1",
        "    replica:",
        "      count: 1",
        "    init:",
        "      count: 1",
        "      slots: 4",
        "    run:",
        "      count: 1",
        "      slots: 32",
        "    eval:",
        "      count: 1",
        "      slots: 8",
        "  processes_total: 5",
        "  rollouts: 256",
        f"  run_dir: {workplace}/runs/demo",
        f"  store: {workplace}/runs/store",
        out.splitlines()[20],
    ]
    assert re.fullmatch(r"  config_digest: [0-9a-f]{64}", out.splitlines()[20])


def test_external_engines_are_none_of_our_processes(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    _, planned = plan(capsys, "fleet=external", "fleet.urls=[http://127.0.0.1:8000]", "fleet.model=org/name")
    assert planned["processes"]["replica"] == {"count": 0}  # type: ignore[index]


def test_paths_are_absolute_and_names_stay_names(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    config, _ = plan(capsys, "run_dir=../other/./run", "store='~/layers'", "fleet.model=./model", "import_path=[lib]")
    assert config.run_dir == str(workplace.parent / "other" / "run")
    assert config.store == str(Path.home() / "layers")
    assert config.fleet.model == str(workplace / "model")
    assert config.import_path == [str(workplace / "lib"), str(workplace)]
    assert plan(capsys, "fleet.model=tiny")[0].fleet.model == "tiny"


def test_a_users_package_is_found_beside_the_config_dir(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "settings").mkdir()
    elsewhere = workplace.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config, _ = plan(capsys, "--config-dir", str(workplace / "settings"))
    assert config.import_path == [str(workplace)]


BAD = [
    (["foo=1"], "foo is not a key"),
    (["checkpoint.turns=-1"], "checkpoint.turns got -1"),
    (["fleet=external"], "fleet.urls got []; allowed: at least one URL"),
    (["lease.heartbeat_s=20"], "lease.heartbeat_s got 20; allowed: below 15, half of lease.ttl_s=30"),
    (["stuck_after_s=inf"], "stuck_after_s got inf; allowed: a finite number"),
    (["action=later"], "action got 'later' (text); allowed: run, submit, plan"),
    (["action=submit"], "action=submit needs a cluster; placement=local runs at once: use action=run"),
    (["task._target_=nope_pkg.Task"], "task._target_ got 'nope_pkg.Task', but there is no package nope_pkg"),
    (["task._target_=Task"], "task._target_ got 'Task'; allowed: package.module.Class"),
    ([f"task._target_={OWN_PACKAGE}.Nope"], "has no class Nope; it has MyTask, MyAgent"),
    ([f"task._target_={OWN_PACKAGE}.inner.Nope"], "importing own_rollmill_pkg.inner failed: ModuleNotFoundError"),
    (["--config-dir"], "--config-dir needs a directory"),
    (["--config-dir=/nope"], "--config-dir /nope is not a directory"),
    (["--cfg", "job"], "--cfg is not an option"),
    (["stauts"], "'stauts' is not a verb; did you mean status?"),
    (["runs/demo"], "'runs/demo' is not a verb"),
    (["seed=1", "status"], "'status' is neither key=value nor a verb"),
    (["top"], "rollmill top is not built yet"),
    (["resume", "x"], "x is not a directory"),
    (["scale", "x", "pools.run"], "got 'pools.run'; wanted pools.{init,run,eval}=+N"),
    (["report"], "rollmill report is not built yet"),
    (["images", "build", "one"], "build takes NAME and DEFINITION"),
    (["images", "import", "one"], "import takes NAME and SOURCE"),
    (["images", "import", "one", "/nope"], "/nope does not exist"),
    (["images", "import", "host", "/"], "'host' is no image name"),
    (["images", "import", "one", "~no-such-user/x"], "~no-such-user/x: there is no such home directory"),
    (["images", "verify", "nope", "--store", "/nope"], "no image 'nope' in /nope/images; there is none"),
    (["status"], "there is no run under"),
    (["status", "nowhere"], "nowhere is not a directory"),
    (["status", "."], "has no manifest.json"),
    (["status", "--jsn"], "unrecognized arguments: --jsn; see rollmill status --help"),
    (["export", "."], "the following arguments are required: --format, -o/--output"),
    (["-m", "seed=1,2", "foo=1"], "foo is not a key"),
    (["-m", "seed=1,-2"], "seed got -2 (a whole number)"),
]


@pytest.mark.parametrize(("args", "said"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], workplace: Path, args: list[str], said: str
) -> None:
    named = {arg.partition("=")[0] for arg in args}
    own = [text for text in OWN if text.partition("=")[0] not in named and any("=" in arg for arg in args)]
    code, out, err = call(capsys, *args, *own)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"rollmill: [^\n]*\n", err)
    assert said in err
    assert not (workplace / "runs").exists()


def test_debug_adds_the_traceback(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_DEBUG", "1")
    code, _, err = call(capsys, "foo=1")
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("rollmill: foo is not a key")


def test_a_sweep_plans_each_point_in_its_own_directory(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, _ = call(capsys, "-m", "action=plan", "seed=3,4", "run_dir=runs/s", *OWN)
    assert code == 0
    documents = [yaml.safe_load("plan:" + part) for part in out.split("plan:")[1:] if "processes" in part]
    assert [document["plan"]["run_dir"] for document in documents] == [
        str(workplace / "runs" / "s" / place) for place in ("0", "1")
    ]
    assert {document["plan"]["store"] for document in documents} == {str(workplace / "runs" / "s" / "store")}
    assert [document["config"]["seed"] for document in documents] == [3, 4]


def test_a_swept_run_dir_is_taken_as_it_is(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    _, out, _ = call(capsys, "-m", "action=plan", "run_dir=runs/a,runs/b", *OWN)
    assert re.findall(r"^  run_dir: (.*)$", out, re.MULTILINE)[::2] == [str(workplace / "runs" / name) for name in "ab"]


def test_a_points_failure_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def act(config: Config) -> int:
        if config.seed == 1:
            raise OSError(28, "No space left on device")
        return 0

    configs = [replace(Config(), seed=seed, run_dir=f"/runs/{seed}") for seed in range(3)]
    points = act_on_all(configs, ["seed=0", "seed=1", "seed=2"], act)
    assert points == [("seed=0", "/runs/0", 0), ("seed=1", "/runs/1", 1), ("seed=2", "/runs/2", 0)]
    assert capsys.readouterr().err == "rollmill: seed=1: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a got 1"), 2, "a got 1"),
        (CommandError("no\nsuch"), 2, "no such"),
        (ManifestError("of another config"), 2, "of another config"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/x"), 1, "[Errno 13] Permission denied: '/x'"),
        (KeyError("x"), 1, "KeyError: 'x'; this is a fault of rollmill"),
        (ExceptionGroup("two", [ExceptionGroup("one", [ConfigError("inner")]), KeyError("y")]), 2, "inner"),
    ],
)
def test_every_error_has_its_line_and_its_exit_code(error: BaseException, code: int, said: str) -> None:
    line, exit_code = describe(error)
    assert (exit_code, line.startswith(said)) == (code, True)


def test_exit_codes_are_the_contracts() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "DONE": 0,
        "FAILED": 1,
        "WRONG": 2,
        "REQUEUED": 75,
        "INTERRUPTED": 130,
    }


def test_packages_of_one_place_pass() -> None:
    assert check_packages() == Path(__file__).resolve().parents[3]


def test_a_foreign_package_is_named_with_its_file(tmp_path: Path) -> None:
    def find(name: str) -> Path:
        return tmp_path / ("foreign" if name == "sandbox" else "ours") / name / "__init__.py"

    with pytest.raises(InstallationError, match=rf"package sandbox comes from {tmp_path}/foreign/sandbox/__init__\.py"):
        check_packages(find=find)
    with pytest.raises(InstallationError, match="package conf is missing beside"):
        check_packages(find=lambda name: None if name == "conf" else tmp_path / name / "__init__.py")


def test_a_foreign_package_on_the_path_stops_the_real_command(tmp_path: Path) -> None:
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "__init__.py").write_text("")
    done = run_python("-P", "-m", "launch", "--version", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"package workflows comes from {tmp_path}/workflows/__init__.py" in done.stderr


def run_python(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(env or {})},
    )


def test_help_answers_at_once_without_heavy_imports() -> None:
    best = min(_timed_help() for _ in range(3))
    assert best < 1.0  # 0.15 s alone; the margin is for a busy machine, the imports are what is held below
    script = (
        "import sys; from launch.cli import main; main(['--help']); "
        "sys.exit(bool({'hydra', 'omegaconf', 'rich', 'asyncio', 'pyarrow', 'httpx', 'numpy'} & set(sys.modules)))"
    )
    assert run_python("-P", "-c", script).returncode == 0


def _timed_help() -> float:
    began = time.monotonic()
    assert run_python("-P", "-m", "launch", "--help").returncode == 0
    return time.monotonic() - began


def test_version_is_one_line() -> None:
    done = run_python("-P", "-m", "launch", "--version")
    assert re.fullmatch(r"rollmill \S+\n", done.stdout)
