"""pass@k: the estimator against counting, the interval against its known values, resume by key."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stages.errors import ServiceError
from workflows.evaluate import estimate, evaluate, pass_at, report, score, steps, wilson


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 2, 3), (6, 1, 1), (4, 0, 2), (4, 4, 4), (7, 3, 5)])
def test_pass_at_k_is_the_share_of_drawings_with_a_right_one(n: int, correct: int, k: int) -> None:
    drawings = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at(n, correct, k) == pytest.approx(sum(max(drawing) for drawing in drawings) / len(drawings))


def test_the_interval_is_wilsons() -> None:
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(1.0, 8) == pytest.approx((0.6756, 1.0), abs=1e-4)
    low, high = wilson(0.0, 20)
    assert low == 0.0 and 0 < high < 0.2


def row(rollout_id: str, reward: float | None, *, masked: bool = False) -> dict[str, Any]:
    return {"rollout_id": rollout_id, "reward": reward, "mask_sample": masked, "task_id": "t"}


def test_masked_rollouts_are_no_wrong_answers() -> None:
    one = score("t", [row("g1-2", None, masked=True), row("g1-0", 1.0), row("g1-1", 0.5)])
    assert (one.n, one.correct, one.masked, one.mean_reward) == (2, 1, 1, 0.75)
    assert one.rewards == [1.0, 0.5, None] and one.rollout_ids == ["g1-0", "g1-1", "g1-2"]
    lost = score("u", [row("g2-0", None, masked=True)])
    found = estimate([one, lost], 1)
    assert found is not None and (found.value, found.tasks) == (0.5, 1)
    assert estimate([one, lost], 3) is None
    made = report([one, lost], 3, tag="e")
    assert made["pass_at_k"]["2"]["value"] == 1.0 and made["pass_at_k"]["3"] is None
    assert (made["tasks_without_result"], made["masked"], made["rollouts"]) == (1, 2, 4)


def test_reported_steps_are_powers_of_two_and_k() -> None:
    assert [steps(k) for k in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]


class Client:
    """A router that closes every group at once and admits `most` of them a submission."""

    def __init__(self) -> None:
        self.keys: dict[str, list[dict[str, Any]]] = {}
        self.lines: list[dict[str, Any]] = []
        self.refusals = 1
        self.broken_after = 99

    async def submit(self, tasks: list[Any], *, idempotency_key: str, **options: Any) -> list[dict[str, Any]]:
        if self.refusals:
            self.refusals -= 1
            raise ServiceError(429, "too_many_open", "full")
        assert len(tasks) * options["group_size"] <= 4, "what is asked for at once fits in beside other traffic"
        if len(self.keys) >= self.broken_after:
            raise ConnectionError
        if idempotency_key not in self.keys:
            groups = self.keys[idempotency_key] = []
            for task in tasks:
                group_id = f"g{len(self.lines)}"
                ids = [f"{group_id}-{i}" for i in range(options["group_size"])]
                for rollout_id in ids:
                    line = {"type": "rows", **row(rollout_id, 1.0), "group_id": group_id, "seq": len(self.lines) + 1}
                    self.lines.append({**line, "task_id": task["task_id"]})
                self.lines.append({"type": "group", "group_id": group_id, "seq": len(self.lines) + 1})
                groups.append({"group_id": group_id})
        return self.keys[idempotency_key]

    async def results(self, after: int = 0, **options: Any) -> tuple[list[dict[str, Any]], int]:
        return self.lines[after:], len(self.lines)


async def test_an_evaluation_that_is_repeated_goes_on_from_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workflows.evaluate.FULL_S", 0.0)
    client = Client()
    client.broken_after = 1
    tasks = [{"task_id": f"t{i}"} for i in range(5)]
    asked: dict[str, Any] = {
        "k": 2, "tag": "e", "priority": 9, "sampling": {}, "key": "run", "max_open": 64,
    }  # fmt: skip
    with pytest.raises(ConnectionError):
        await evaluate(client, tasks, **asked)  # type: ignore[arg-type]
    client.broken_after = 99
    rows = await evaluate(client, tasks, **asked)  # type: ignore[arg-type]
    assert [one["task_id"] for one in rows] == [f"t{i}" for i in range(5) for _ in range(2)]
    assert len(client.keys) == 3 and len(client.lines) == 15
