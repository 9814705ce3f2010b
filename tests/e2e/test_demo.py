"""The main job on real parts: one demo run, and everything that it promises read back from its files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import SamplingParams, token_logprobs
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import GroupSpec, Submitted
from stages.shards import ShardReader
from tests.support import runs

POLICIES = runs.REPOSITORY / "workflows" / "policies"


class Demo:
    """The run directory of a finished demo, its output and the processes seen while it ran."""

    def __init__(self, run_dir: Path, output: str, kinds: Counter[str]) -> None:
        self.run_dir, self.output, self.kinds = run_dir, output, kinds


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    kinds: Counter[str] = Counter()
    with runs.running(run_dir) as process:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.1):
                for kind, count in Counter(member["kind"] for member in runs.members(run_dir)).items():
                    kinds[kind] = max(kinds[kind], count)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            done.set()
            watcher.join()
    assert process.returncode == 0, errors
    return Demo(run_dir, output, kinds)


def test_all_256_are_committed_once_and_the_policy_solves_them(demo: Demo) -> None:
    runs.exactly_once(demo.run_dir, 256)
    assert {row["status"] for row in runs.rows(demo.run_dir)} == {"completed"}
    assert np.mean([row["reward"] for row in runs.rows(demo.run_dir)]) >= 0.9


def test_the_result_is_printed_with_rates_and_where_the_shards_are(demo: Demo) -> None:
    for words in ("256 completed", "mean reward", "rollouts/s", str(demo.run_dir / "shards")):
        assert words in demo.output


def test_every_kind_of_process_was_there(demo: Demo) -> None:
    assert demo.kinds == {"router": 1, "replica": 1, "init": 1, "run": 1, "eval": 1}


def test_nothing_is_left_behind(demo: Demo) -> None:
    assert runs.members(demo.run_dir) == []
    assert list((demo.run_dir / "handoff").iterdir()) == []
    assert json.loads((demo.run_dir / "router.json").read_text())["ended"] is True
    assert not list(demo.run_dir.rglob("*.tmp"))


def test_replaying_the_journal_gives_the_live_state(demo: Demo) -> None:
    ledger, summary = runs.replayed(demo.run_dir), runs.summary(demo.run_dir)
    assert (
        ledger.state.run_id == summary["run_id"] == json.loads((demo.run_dir / "manifest.json").read_text())["run_id"]
    )
    assert ledger.state.seq == summary["seq"] == len(runs.index(demo.run_dir))
    assert ledger.state.counts.reward_sum / ledger.state.counts.reward_n == summary["reward"]["mean"]
    assert ledger.state.counts.completed == summary["rollouts"]["completed"]


def test_init_ran_once_an_environment_whatever_the_group_size(demo: Demo) -> None:
    environments = {group.environment for group in _submitted(demo.run_dir)}
    ledger = runs.replayed(demo.run_dir)
    assert len(_submitted(demo.run_dir)) == 64
    assert ledger.state.counts.init_prepared == len(environments) < 64
    assert ledger.state.counts.init_cached == 0


def _submitted(run_dir: Path) -> list[GroupSpec]:

    return [
        group for event in read_events(RunLayout(run_dir)) if isinstance(event, Submitted) for group in event.groups
    ]


def test_a_second_run_starts_from_the_cached_layers(demo: Demo) -> None:
    second = demo.run_dir.parent / "second"
    result = runs.run(second, "group_size=1")
    assert result.returncode == 0, result.stderr
    counts = runs.replayed(second).state.counts
    assert counts.init_prepared == 0 and counts.init_cached > 0


def test_starting_again_prints_the_result_and_another_config_is_refused(demo: Demo) -> None:
    before = {path: path.stat().st_mtime_ns for path in demo.run_dir.rglob("*")}
    again = runs.run(demo.run_dir)
    assert again.returncode == 0 and "256 completed" in again.stdout
    other = runs.run(demo.run_dir, "group_size=2")
    assert other.returncode == 2 and other.stderr.count("\n") == 1 and "another config" in other.stderr
    assert {path: path.stat().st_mtime_ns for path in demo.run_dir.rglob("*")} == before


def test_the_streams_are_well_formed_and_use_the_tool(demo: Demo) -> None:
    turns: Counter[int] = Counter()
    for row in ShardReader(demo.run_dir):
        (chain,) = row.chains
        ids, mask, logprobs = chain["token_ids"], chain["loss_mask"], chain["logprobs"]
        assert len(ids) == len(mask) == len(logprobs)
        assert all(logprob == 0.0 for logprob, sampled in zip(logprobs, mask, strict=True) if not sampled)
        sampled = [position for position, bit in enumerate(mask) if bit]
        spans = [position for turn in chain["turns"] for position in range(turn["start"], turn["end"])]
        assert sampled == spans
        assert chain["prompt_length"] == chain["turns"][0]["start"] > 0
        versions = [p for span in chain["policy_versions"] for p in range(span["start"], span["end"])]
        assert versions == sampled and {span["version"] for span in chain["policy_versions"]} == {0}
        turns[len(chain["turns"])] += 1
    assert turns[2] > 64 and turns[3] > 0


def test_each_prompt_was_the_stream_so_far_by_the_log_probs_that_the_checkpoint_gives(demo: Demo) -> None:
    assert _largest_gap(demo.run_dir, SamplingParams(temperature=1.0)) <= 1e-4


def test_log_probs_are_those_of_the_distribution_sampled_from(demo: Demo) -> None:
    run_dir = demo.run_dir.parent / "sharper"
    result = runs.run(
        run_dir, "sampling.temperature=0.7", "sampling.top_p=0.9", "task.limit=24", "fleet.model=tiny-half"
    )
    assert result.returncode == 0, result.stderr
    assert _largest_gap(run_dir, SamplingParams(temperature=0.7, top_p=0.9), "tiny-half") <= 1e-4
    rewards = [row["reward"] for row in runs.rows(run_dir)]
    assert 0.0 < np.mean(rewards) < 0.9


def _largest_gap(run_dir: Path, params: SamplingParams, policy: str = "tiny") -> float:
    model, worst, checked = Qwen3.load(POLICIES / policy), 0.0, 0
    for row in ShardReader(run_dir):
        for chain in row.chains:
            ids, mask = np.array(chain["token_ids"]), np.array(chain["loss_mask"], bool)
            recomputed = token_logprobs(model.logits(ids)[:-1], ids[1:], params)
            recorded = np.array(chain["logprobs"])[1:]
            gaps = np.abs(np.asarray(recomputed) - recorded)[mask[1:]]
            worst, checked = max(worst, float(gaps.max(initial=0.0))), checked + gaps.size
    assert checked > 500
    return worst


def test_the_verbs_read_the_run(demo: Demo, tmp_path: Path) -> None:
    status = _rollmill("status", str(demo.run_dir), "--json")
    assert json.loads(status)["rollouts"]["completed"] == 256
    events = _rollmill("journal", str(demo.run_dir), "--json").splitlines()
    assert json.loads(events[0])["type"] == "epoch" and len(events) > 100
    for kind in ("jsonl", "parquet"):
        _rollmill("export", str(demo.run_dir), "--format", kind, "-o", str(tmp_path / f"rows.{kind}"))
        assert (tmp_path / f"rows.{kind}").stat().st_size > 10_000
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert first["status"] == "completed" and first["task"] == "arith" and first["agent"] == "tools"


def _rollmill(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "launch", *arguments], cwd=runs.REPOSITORY, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout
