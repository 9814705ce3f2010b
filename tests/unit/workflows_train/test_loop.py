"""The trainer's loop over a router that answers at once: what it asks for, learns from, pushes; and kills anywhere."""

from __future__ import annotations

import asyncio
import csv
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.training import Heldout
from stages import sharedfs
from stages.errors import ServiceError
from tests.unit.workflows_train.world import MINIBATCHES, Router, lives, logprob, settings, trainer
from workflows.train.loop import HELDOUT_TAG
from workflows.train.records import Places, read_state


def train(run_dir: Path, **keys: Any) -> tuple[Any, Any, Router]:
    router = Router()
    client: Any = router
    work, policy = trainer(run_dir, router, settings(**keys))
    return asyncio.run(work.to_the_end(client, router)), policy, router


def never(_: int) -> None:
    return None


def test_every_update_is_a_version_on_the_fleet_and_a_line_of_the_table(tmp_path: Path) -> None:
    state, policy, router = train(tmp_path)
    assert [record.step for record in state.records] == [0, 1, 2, 3, 4] and router.pushed == [1, 2, 3, 4]
    assert router.loaded == [MINIBATCHES * version for version in router.pushed] and policy.steps == 4 * MINIBATCHES
    lines = list(csv.DictReader((tmp_path / "report" / "train.csv").read_text().splitlines()))
    assert [line["step"] for line in lines] == ["0", "1", "2", "3", "4"]
    assert [line["heldout_asked"] for line in lines] == ["5", "", "2", "", "5"]
    assert [line["heldout_problems"] for line in lines] == ["4", "", "2", "", "4"], "one of the five is masked"


def test_dapo_goes_on_asking_until_enough_groups_differ_and_grpo_takes_what_comes(tmp_path: Path) -> None:
    dapo = train(tmp_path / "dapo")[0].records[1:]
    assert all(record.groups_kept >= 3 for record in dapo) and sum(record.groups_flat for record in dapo) > 0
    grpo = train(tmp_path / "grpo", algorithm="grpo")[0].records[1:]
    assert all(record.groups_kept == record.groups_asked == 3 for record in grpo)


def test_dapo_stops_asking_after_so_many_waves(tmp_path: Path) -> None:
    router = Router()
    work, policy = trainer(tmp_path, router, settings(waves=3, steps=1), ["task-0", "task-1"])
    client: Any = router
    record = asyncio.run(work.to_the_end(client, router)).records[1]
    assert (record.groups_kept, record.groups_flat) == (0, record.groups_asked) and policy.seen == []
    assert sum(key.startswith("train-run-1-") for key in router.keys) == 3
    state = read_state(Places(tmp_path))
    assert state is not None and state.rate == pytest.approx(0.35), "an update moves the expected share once"


def test_masked_rollouts_are_counted_and_not_learnt_from(tmp_path: Path) -> None:
    state, policy, _ = train(tmp_path)
    assert sum(record.masked for record in state.records) > 0
    assert sum(record.samples for record in state.records) == len(policy.seen)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_tokens_log_prob_is_checked_under_the_version_that_drew_it(tmp_path: Path, mode: str) -> None:
    state, policy, _ = train(tmp_path, mode=mode)
    assert max(record.gap_max for record in state.records) == 0.0
    assert all(record.gap_tokens == 2 * record.samples for record in state.records[1:])
    lags = [record.lag_max for record in state.records[1:]]
    assert lags == ([0, 0, 0, 0] if mode == "sync" else [0, 1, 1, 1])
    for one in policy.seen:
        older, newer = one.sample.versions
        assert one.sample.recorded == [logprob(older), logprob(newer)] and one.started == [logprob(newer)] * 2


def test_asynchronous_training_leaves_nothing_open(tmp_path: Path) -> None:
    router = Router()
    keys = settings(mode="async", steps=50, stop_after_s=60)
    work, _ = trainer(tmp_path, router, keys, clock=itertools.count().__next__)  # a second at every look
    client: Any = router
    state = asyncio.run(work.to_the_end(client, router))
    assert 0 < state.version < 50
    closed = {line["group_id"] for line in router.lines if line["type"] == "group"}
    assert closed | set(router.cancelled) == router.accepted.keys()


def test_what_takes_too_long_to_measure_ends_training_before_it_begins(tmp_path: Path) -> None:
    router = Router()
    keys = settings(mode="async", stop_after_s=0.5)
    work, _ = trainer(tmp_path, router, keys, clock=itertools.count().__next__)
    client: Any = router
    assert asyncio.run(work.to_the_end(client, router)).version == 0 and router.cancelled == []


class SlowProbes(Router):
    """Measuring any version but the first takes 100 s."""

    seconds = 0.0

    def look(self) -> float:
        self.seconds += 0.001
        return self.seconds

    async def submit(self, tasks: Sequence[Any], *, tag: str = "", **more: Any) -> list[dict[str, Any]]:
        self.seconds += 100 if self.version and tag == HELDOUT_TAG else 0
        return await super().submit(tasks, tag=tag, **more)


def test_a_probe_that_crosses_the_limit_is_followed_by_all_problems(tmp_path: Path) -> None:
    router = SlowProbes()
    keys = settings(stop_after_s=50, heldout=Heldout(every=1, probe=2))
    work, _ = trainer(tmp_path, router, keys, clock=router.look)
    client: Any = router
    last = asyncio.run(work.to_the_end(client, router)).records[-1]
    assert (last.step, last.heldout_asked, round(last.heldout_s)) == (1, 5, 200)


def test_of_masked_problems_alone_nothing_is_measured_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router()
    work, _ = trainer(tmp_path, router, settings(steps=1), heldout=["heldout-4"])
    client: Any = router
    records = asyncio.run(work.to_the_end(client, router)).records
    assert [(one.heldout, one.heldout_problems, one.heldout_asked) for one in records] == [(None, None, 1)] * 2
    assert caplog.text.count("nothing could be measured") == 2


def test_no_wave_is_larger_than_the_router_takes(tmp_path: Path) -> None:
    router = Router()
    work, _ = trainer(tmp_path, router, settings(waves=3, steps=1), ["task-0", "task-1"], max_open=18)
    client: Any = router
    asyncio.run(work.to_the_end(client, router))
    waves = [len(groups) for key, (_, groups) in router.keys.items() if key.startswith("train-")]
    assert waves == [4, 4, 4], "18 open rollouts are four groups of four"


def test_groups_are_read_by_their_own_lines(tmp_path: Path) -> None:
    _, _, router = train(tmp_path)
    assert router.polled == {("train", False), ("heldout", True)}


class TwoChains(Router):
    """Every rollout has two chains."""

    def get(self, rollout_id: str) -> Any:
        row = super().get(rollout_id)
        return SimpleNamespace(line=row.line, chains=row.chains * 2)


def test_all_chains_of_a_rollout_are_in_one_optimizer_step(tmp_path: Path) -> None:
    router = TwoChains()
    work, policy = trainer(tmp_path, router, settings())
    client: Any = router
    asyncio.run(work.to_the_end(client, router))
    assert len(policy.batches) == 4 * MINIBATCHES
    assert all(set(Counter(batch).values()) == {2} for batch in policy.batches)


class Succeeded(Router):
    """Is killed in the middle of a push; the next router has finished it when the call comes again."""

    def __init__(self, code: str = "not_newer", reached: int = 1) -> None:
        super().__init__()
        self.code, self.reached = code, reached

    async def policy(self, version: int | None = None, **body: Any) -> dict[str, Any]:
        if version == 1 and self.version == 0:
            self.version = self.reached
            raise ServiceError(409, self.code, "not above the current one")
        return await super().policy(version, **body)


def test_a_push_that_the_next_router_has_finished_is_done(tmp_path: Path) -> None:
    router = Succeeded()
    work, _ = trainer(tmp_path, router, settings())
    client: Any = router
    assert asyncio.run(work.to_the_end(client, router)).version == 4 and router.pushed == [2, 3, 4]


@pytest.mark.parametrize(("code", "reached"), [("not_newer", 7), ("busy", 1)])
def test_a_push_that_is_refused_otherwise_ends_training(tmp_path: Path, code: str, reached: int) -> None:
    router = Succeeded(code, reached)
    work, _ = trainer(tmp_path, router, settings())
    client: Any = router
    with pytest.raises(ServiceError, match="not above"):
        asyncio.run(work.to_the_end(client, router))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_anywhere_it_goes_on_with_the_same_groups_and_uses_none_twice(tmp_path: Path, mode: str) -> None:
    keys = settings(mode=mode, steps=2, heldout=Heldout(every=1, problems=3, probe=2))
    calm = Router()
    wanted = lives(tmp_path / "calm", calm, keys, never)
    steps = calm.clock.now
    assert steps > 20
    for at in range(1, steps + 1):
        router, run_dir = Router(), tmp_path / f"killed-{at}"
        state = lives(run_dir, router, keys, lambda life, at=at: at if life == 0 else None)
        assert [record.groups for record in state.records] == [record.groups for record in wanted.records], at
        assert router.accepted.keys() == calm.accepted.keys() and router.pushed == [1, 2], at
        assert router.loaded == calm.loaded, at
        used = [group for record in state.records for group in record.groups]
        assert len(used) == len(set(used)) and max(record.gap_max for record in state.records) == 0.0


def test_it_gets_through_though_every_life_is_short(tmp_path: Path) -> None:
    calm, router = Router(), Router()
    lives(tmp_path / "calm", calm, settings(), never)
    state = lives(tmp_path / "short", router, settings(), lambda life: 9 + life // 4)
    assert state.version == 4 and router.pushed == [1, 2, 3, 4]
    assert router.accepted.keys() == calm.accepted.keys(), "it asked for groups anew"


def test_old_weights_and_half_written_files_go_and_the_last_weights_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []
    monkeypatch.setattr(sharedfs, "list_dir", lambda path: listed.append(path) or sorted(os.listdir(path)))
    _, _, router = train(tmp_path, keep=2, steps=4)
    assert tmp_path / "train" not in listed, "only a trainer that comes back has to look"
    (tmp_path / "train" / "policy-000001").mkdir()
    (tmp_path / "train" / "optimizer-000002.pt").write_bytes(b"left by a kill")
    (tmp_path / "train" / ".state.json.node.1.2.tmp").write_bytes(b"{")
    client: Any = router
    work, _ = trainer(tmp_path, router, settings(keep=2, steps=5))
    asyncio.run(work.to_the_end(client, router))
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
        "optimizer-000004.pt", "optimizer-000005.pt", "policy-000004", "policy-000005", "state.json",
    ]  # fmt: skip
    state = read_state(Places(tmp_path))
    assert state is not None and state.version == 5
