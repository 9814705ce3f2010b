"""task=swe by the real command: cheats that score nothing, data that fails alone, environments that are made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.shards import ShardReader
from tests.support import runs
from tests.support import swe_instance as small
from tests.support.cheats.swe import CHEATS, HONEST
from tests.support.searching import nothing_is_left_of

SWE = ("task=swe", "task.limit=null", "sandbox=bubblewrap", "task.options.test_s=15")


def swe(run_dir: Path, data: Path, *overrides: str, agent: str = "agent=oracle") -> None:
    """One run to its end; it must end well."""
    done = runs.run(run_dir, *SWE, f"task.path={data}", agent, "group_size=1", *overrides, timeout_s=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def shards(run_dir: Path) -> dict[str, Any]:
    return {row["task_id"]: row for row in ShardReader(run_dir)}


ON_APPTAINER = [
    "background",
    "conftest",
    "fifo",
    "ld-so-preload",
    "python-replaced",
    "tests-searched",
    "tests-symlinked",
]
"""Those that lean on what a backend does; all of them: `python -m tests.support.cheats graded swe apptainer`."""


@pytest.mark.parametrize(("backend", "names"), [("bubblewrap", [*CHEATS]), ("apptainer", ON_APPTAINER)])
def test_every_cheat_scores_nothing_and_honest_work_scores(tmp_path: Path, backend: str, names: list[str]) -> None:
    data = small.write(tmp_path, [small.row(name) for name in (*HONEST, *names)])
    agent = "agent._target_=tests.support.cheats.swe.CheatingAgent"
    swe(tmp_path / "run", data, f"sandbox={backend}", agent=agent)
    graded = shards(tmp_path / "run")
    assert {name: row["reward"] for name, row in graded.items()} == {**dict.fromkeys(names, 0.0), "honest": 1.0}
    assert {row["grading"] for row in graded.values()} == {"trusted"}
    if "runtest-patched" in names:  # what patches the runner passes all tests, and is seen by its canaries
        parts = dict(graded["runtest-patched"]["reward_parts"])
        assert parts == {"f2p": 1.0, "p2p": 1.0, "canary": 0.0, "format": 1.0}


def test_what_is_wrong_with_a_row_fails_that_row_alone_and_once(tmp_path: Path) -> None:
    none = f"{small.TESTS}::test_that_nobody_wrote"
    broken = {
        "truncated": small.row("truncated", archive="truncated.tar.gz"),
        "unresolvable": small.row("unresolvable", requirements=["pytest<9", "pytest>9"]),
        "own": small.row("own", repo="pytest-dev/pluggy"),
        "no-such-test": small.row("no-such-test", FAIL_TO_PASS=[none]),
        "line-5": small.row("columnless", patch=None),
        "line-6": "{broken",
    }
    data = small.write(tmp_path, [*broken.values(), small.row("good")])
    (tmp_path / "truncated.tar.gz").write_bytes((tmp_path / "tally.tar.gz").read_bytes()[:300])
    swe(tmp_path / "run", data)
    rewards = {line["task_id"]: line["reward"] for line in runs.rows(tmp_path / "run")}
    assert rewards == {**dict.fromkeys(broken), "good": 1.0}
    lines = (tmp_path / "run" / "failures.jsonl").read_text().splitlines()
    failures = {failure["task_id"]: failure for failure in map(json.loads, lines)}
    said = {
        "truncated": ("infrastructure", "truncated.tar.gz cannot be unpacked"),
        "unresolvable": ("infrastructure", "conflicting dependencies"),
        "own": ("infrastructure", "own distribution, pluggy"),
        "no-such-test": ("verifier", "test_that_nobody_wrote exists"),
        "line-5": ("infrastructure", "instances.jsonl:5: column patch is missing"),
        "line-6": ("infrastructure", "instances.jsonl:6: not JSON"),
    }
    for task_id, (kind, message) in said.items():
        failure = failures[task_id]
        assert (failure["class"], failure["attempts"]) == (kind, 1), failure
        assert message in failure["message"], failure
        assert "\n" not in failure["message"] and len(failure["message"]) <= 600, failure


def test_an_environment_is_made_once_and_no_private_column_is_where_an_agent_could_look(tmp_path: Path) -> None:
    data = small.write(tmp_path, [small.row("a"), small.row("b", version="1.0.1")])
    swe(tmp_path / "oracle", data, "group_size=8")
    assert runs.summary(tmp_path / "oracle")["init"] == {"prepared": 2, "cached": 0}
    assert [line["reward"] for line in runs.rows(tmp_path / "oracle")] == [1.0] * 16
    layers = sorted((tmp_path / "store" / "layers").rglob("*.*"))
    made = {path: path.stat().st_ino for path in layers}  # not its time: a use is noted there
    assert len(list((tmp_path / "store" / "layers" / "keys").iterdir())) == 2
    assert len(list((tmp_path / "store" / "wheels" / "locks").glob("*.json"))) == 1
    words = f"+agent.options.words='{' '.join(small.SECRETS)}'"
    swe(tmp_path / "second", data, words, agent="agent._target_=tests.support.searching.Searcher")
    assert runs.summary(tmp_path / "second")["init"] == {"prepared": 0, "cached": 2}
    assert {path: path.stat().st_ino for path in sorted((tmp_path / "store" / "layers").rglob("*.*"))} == made
    for row in shards(tmp_path / "second").values():
        assert row["reward"] == 0.0
        assert dict(row["reward_parts"]) == pytest.approx({"f2p": 0.0, "p2p": 1.0, "canary": 1.0, "format": 1.0})
    nothing_is_left_of(small.SECRETS, tmp_path / "second")
