"""One serving run: a trainer through a router's death, an evaluation beside it, other systems' clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages import beacon
from stages.client import AsyncRolloutClient, RolloutClient
from stages.layout import RunLayout
from tests.support import runs

TASKS = 8
SERVE = (
    "workflow=serve", f"task.limit={TASKS}", "pools.run.slots=16", "compat.prorl=true", "compat.nemo_gym=true",
    "fleet.model=tiny-half",
)  # fmt: skip


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A service that the drain verb ends at last, with exit code 0 and its result."""
    run_dir = tmp_path_factory.mktemp("service") / "run"
    with runs.running(run_dir, *SERVE) as process:

        def is_up() -> bool:
            assert process.poll() is None, process.communicate()
            return {"router", "replica", "init", "run", "eval"} <= {member["kind"] for member in runs.members(run_dir)}

        runs.poll(is_up, "every process of the service")
        yield run_dir
        assert process.poll() is None, process.communicate()
        drained = runs.verb("drain", run_dir)
        assert drained.returncode == 0, drained.stderr
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "completed" in output
    assert runs.summary(run_dir)["state"] == "completed" and runs.members(run_dir) == []


def names(count: int) -> list[dict[str, str]]:
    return [{"task_id": f"arith-0-{i % TASKS}"} for i in range(count)]


async def test_a_trainer_gets_every_group_once_though_the_router_is_killed_twice(serving: Path) -> None:
    """The loop has no code of its own for it."""
    seen: list[str] = []
    killed: set[int] = set()
    async with AsyncRolloutClient(serving) as client:
        async for group in client.stream(names(24), 2, in_flight=8, tag="train"):
            seen.append(group.group_id)
            assert len(group.rows) == 2 and group.tag == "train"
            if len(seen) in {3, 12}:
                (router,) = [m["pid"] for m in runs.members(serving) if m["kind"] == "router"] or [0]
                if router and router not in killed:
                    killed.add(router)
                    os.kill(router, signal.SIGKILL)
        assert client.counts.submitted == 24 and client.counts.cancelled == 0
    assert len(seen) == len(set(seen)) == 24 and len(killed) == 2
    closed = [line["group_id"] for line in runs.index(serving) if line["type"] == "group" and line["tag"] == "train"]
    assert sorted(closed) == sorted(seen)


def evaluated(serving: Path, run_dir: Path) -> dict[str, Any]:
    given = (
        "workflow=evaluate", f"evaluate.run_dir={serving}", "evaluate.k=2", "evaluate.priority=90",
        "sampling.temperature=0", f"task.limit={TASKS}", "fleet.model=tiny-half", "evaluate.tag=measured",
    )  # fmt: skip
    result = runs.run(run_dir, *given)
    assert result.returncode == 0, result.stderr
    assert "pass@1" in result.stdout and "arith-0-7" in result.stdout
    report: dict[str, Any] = json.loads((run_dir / "report" / "evaluation.json").read_text())
    return report


def test_an_evaluation_beside_training_gives_what_it_gives_alone(serving: Path, tmp_path: Path) -> None:
    alone = evaluated(serving, tmp_path / "alone")
    trained: list[str] = []
    over = threading.Event()

    def train() -> None:
        with RolloutClient(serving) as client:
            endless = (task for _ in range(1000) for task in names(TASKS))
            for group in client.stream(endless, 4, in_flight=16, tag="train", leftover="cancel"):
                trained.append(group.tag)
                if over.is_set():
                    return

    training = threading.Thread(target=train)
    training.start()
    runs.poll(lambda: trained, "training traffic")
    beside = evaluated(serving, tmp_path / "beside")
    over.set()
    training.join(60)
    assert not training.is_alive() and set(trained) == {"train"} and len(trained) > 4
    for report in (alone, beside):
        assert (report["tasks"], report["rollouts"], report["masked"]) == (TASKS, TASKS * 2, 0)
        found = report["pass_at_k"]["1"]
        assert found["low"] <= found["value"] <= found["high"] and 0 < found["value"] < 1
    assert [task["rewards"] for task in alone["per_task"]] == [task["rewards"] for task in beside["per_task"]]
    rows = [row for row in runs.rows(serving) if row["tag"] == "measured"]
    assert len(rows) == 2 * TASKS * 2


class Foreign:
    """A client that knows an address and JSON, and nothing of this project."""

    def __init__(self, run_dir: Path) -> None:
        found = beacon.read(RunLayout(run_dir))
        assert found is not None
        self._url = found.url
        token = RunLayout(run_dir).trainer_token.read_text().strip()
        self._basic = "Basic " + b64encode(f"trainer:{token}".encode()).decode()

    def __call__(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode() if body is not None else None,
            {"Authorization": self._basic, "Content-Type": "application/json"}, method=method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


async def test_a_client_written_for_prorl_agent(serving: Path) -> None:
    """As its description has it: add engines, start, process many at once, cancel by job, stop."""
    call = Foreign(serving)
    status, state = call("/status", method="GET")
    assert status == 200 and state["server_running"] is True and len(state["llm_servers"]) == 1
    assert state["llm_servers"][0].endswith("/v1")
    assert call("/start")[1] == {"status": "Server started successfully"}
    asked = [
        {
            "instance": {"instance_id": f"arith-0-{i}", "trajectory_id": i, "data_source": "arith"},
            "sampling_params": {"model": "hosted_vllm/x", "api_key": "k", "temperature": 0.6, "max_output_tokens": 64},
        }
        for i in range(6)
    ]
    answers = await asyncio.gather(*(asyncio.to_thread(call, "/process", body) for body in asked))
    for (status, result), body in zip(answers, asked, strict=True):
        assert status == 200, result
        assert result["instance_id"] == body["instance"]["instance_id"]
        assert result["trajectory_id"] == body["instance"]["trajectory_id"]
        assert result["critical_error"] is None and result["success"] is True
        assert result["resolved"] is (result["reward"] == 1.0)
        assert len(result["token_ids"]) == len(result["logprobs"]) == len(result["loss_mask"]) > 0
        assert result["messages"][0]["role"] == "system" and result["timing"]["run_s"] > 0
    own = {"instance_id": "mine", "data_source": "arith", "question": "12 + 7 - 4 = ?", "answer": 15}
    named = {"instance": own, "sampling_params": {"temperature": 0}, "job_id": "job-1"}
    status, first = call("/process", named)
    assert status == 200 and call("/process", named) == (200, first)
    assert call("/process", {"instance": {}})[0] == 400
    assert call("/cancel", {"job_id": "nobody"})[0] == 404
    assert call("/stop")[1] == {"status": "Server stopped successfully"}
    assert call("/process", asked[0])[0] == 409
    address = state["llm_servers"][0]
    assert call("/clear_llm_server")[1] == {"status": "Cleared all LLM server addresses"}
    assert call("/add_llm_server", {"address": address})[1] == {"status": f"Added LLM server address: {address}"}
    assert call("/start")[0] == 200
    assert call("/process", asked[1])[1]["success"] is True


def test_a_collector_written_for_nemo_gym(serving: Path, tmp_path: Path) -> None:
    """Rows in, rows out; what failed goes to the sidecar; what is missing is asked for again."""
    call = Foreign(serving)
    inputs = [
        {
            "_ng_task_index": i, "_ng_rollout_index": j, "answer": 15, "ground_truth": "15",
            "responses_create_params": {"input": [{"role": "user", "content": "12 + 7 - 4 = ?"}], "temperature": 0.5},
        }
        for i in range(2) for j in range(2)
    ]  # fmt: skip
    done: dict[tuple[int, int], dict[str, Any]] = {}
    for row in inputs:
        key = (row["_ng_task_index"], row["_ng_rollout_index"])
        status, answer = call("/run", row)
        assert status == 200, answer
        assert not answer["mask_sample"] and answer["ground_truth"] == "15" and 0.0 <= answer["reward"] <= 1.0
        assert answer["responses_create_params"] == row["responses_create_params"]
        done[answer["_ng_task_index"], answer["_ng_rollout_index"]] = answer
        with_tokens = [item for item in answer["response"]["output"] if "generation_token_ids" in item]
        assert with_tokens and key in done
        for item in with_tokens:
            assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
        prompts = [item["prompt_token_ids"] for item in with_tokens]
        for before, after, item in zip(prompts, prompts[1:], with_tokens, strict=False):
            grown = [*before, *item["generation_token_ids"]]
            assert after[: len(grown)] == grown
    assert len(done) == 4
    assert call("/run", {"answer": 1})[0] == 400
    output = tmp_path / "rows.jsonl"
    exported = runs.verb("export", serving, "--format", "nemo-gym", "-o", str(output))
    assert exported.returncode == 0, exported.stderr
    assert output.stat().st_size > 0
