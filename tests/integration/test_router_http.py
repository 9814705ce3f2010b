"""The router over real HTTP: the contract's routes, codes and promises."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages import beacon, control
from stages.client import AsyncRolloutClient
from stages.errors import ServiceError, StageError
from stages.http import ReadError, RouterLink
from stages.journal.history import claim, read_events
from stages.layout import RunLayout
from stages.ledger.events import Rules
from stages.ledger.machine import Ledger
from stages.status import fetch_status, read_status
from tests.support.routers import HandWorker, make_run, routed
from tests.support.waiting import eventually


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


def index_lines(layout: RunLayout) -> list[dict[str, Any]]:
    lines = []
    for path in sorted(layout.index.iterdir()):
        lines += [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return lines


async def test_a_submission_is_leased_committed_and_published(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        groups = await trainer.submit([{"task_id": "toy-1"}, {"task_id": "toy-2"}], group_size=2, tag="blue")
        assert [group["task_id"] for group in groups] == ["toy-1", "toy-2"]
        assert await worker.through("init") == ["ok"]
        run = await worker.lease("run")
        assert len(run) == 4
        assert run[0]["input"]["payload"] == {"task_id": "toy-1", "question": "1 + 1"}
        assert run[0]["input"]["layers"] == ["sha256:" + "1" * 64]
        for lease in run:
            assert await worker.commit(lease) == "ok"
        grading = await worker.lease("eval")
        assert grading[0]["input"]["payload"]["answer"] == 2
        for lease in grading:
            assert await worker.commit(lease) == "ok"
            assert await worker.commit(lease) == "already"
        lines, after = await trainer.results(wait_s=5, rows=True)
        while len(lines) < 6:
            more, after = await trainer.results(after, wait_s=5, rows=True)
            lines += more
        assert [line["seq"] for line in lines] == [1, 2, 3, 4, 5, 6]
        only_groups, upto = await trainer.results(0, tag="blue", wait_s=0)
        assert [line["type"] for line in only_groups] == ["group", "group"] and upto == 6
        assert await trainer.results(0, tag="red", wait_s=0) == ([], 6)
        status = await trainer.status()
        assert status["rollouts"] == {"accepted": 4, "completed": 4, "failed": 0, "cancelled": 0, "open": 0}
        assert status["reward"]["mean"] == 1.0
    assert index_lines(layout) == lines
    ledger = Ledger()
    for event in read_events(layout):
        ledger.apply(event)
    assert ledger.state.counts.completed == 4
    assert read_status(layout)["rollouts"] == status["rollouts"]


async def test_a_long_poll_for_work_is_answered_when_work_comes(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        polling = asyncio.create_task(worker.lease("init", wait_s=30))
        await asyncio.sleep(0)
        await trainer.submit([{"task_id": "toy-1"}])
        (lease,) = await asyncio.wait_for(polling, 20)
        assert lease["stage"] == "init" and lease["input"]["environment"]["image"] == "host"
        assert "answer" not in lease["input"]["payload"]


async def test_a_restarted_router_goes_on_as_the_next_epoch_and_workers_and_trainers_find_it(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        await trainer.submit([{"task_id": "toy-1"}], group_size=2, idempotency_key="k")
        await worker.through("init")
        first, second = await worker.lease("run")
        await worker.commit(first)
        old_epoch = link.epoch
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        assert link.epoch == old_epoch + 1
        worker = HandWorker(link, "w-1-a")
        assert (await worker.heartbeat([second["lease_id"]]))["renewed"] == [second["lease_id"]]
        assert await worker.commit(second) == "ok"
        assert await worker.through("eval") == ["ok", "ok"]
        again = await trainer.submit([{"task_id": "toy-1"}], group_size=2, idempotency_key="k")
        assert again[0]["group_id"] == first["rollout_id"].rpartition("-")[0]
        lines, _ = await trainer.results(0, wait_s=5)
        assert [line["type"] for line in lines] == ["group"]
    rows = [line for line in index_lines(layout) if line["type"] == "rows"]
    assert sorted(row["rollout_id"] for row in rows) == sorted([first["rollout_id"], second["rollout_id"]])


async def test_a_stale_epoch_is_refused_by_name(layout: RunLayout) -> None:
    async with routed(layout) as link:
        body = {"member": "w", "epoch": 99, "stage": "run", "free": 1, "wait_s": 0}
        with pytest.raises(ServiceError) as caught:
            await link.call("POST", "/v1/lease", body, answer=bytes)
        assert (caught.value.status, caught.value.code) == (409, "stale_epoch")
        assert caught.value.detail["url"].startswith("http://127.0.0.1:")


async def test_two_routers_of_one_run_are_never_both_there(layout: RunLayout) -> None:
    async with routed(layout) as link:
        with pytest.raises((StageError, ExceptionGroup), match="alive"):
            async with routed(layout):
                pass
        await link.call("GET", "/readyz", answer=bytes)


async def test_a_dead_members_leases_are_given_to_the_next(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        await trainer.submit([{"task_id": "toy-1"}])
        await worker.through("init")
        (lost,) = await worker.lease("run")
        assert await link.call("DELETE", "/v1/members/w-1-a", answer=dict[str, int]) == {"freed": 1}
        (again,) = await HandWorker(link, "w-2-b").lease("run")
        assert again["attempt"] == lost["attempt"] + 1
        assert await worker.commit(lost) == "superseded"


async def test_leases_run_out_by_the_routers_clock(layout: RunLayout) -> None:
    async with (
        routed(layout, rules=Rules(lease_ttl_s=0.6)) as link,
        AsyncRolloutClient(layout.root) as trainer,
    ):
        worker = HandWorker(link, "w-1-a")
        await trainer.submit([{"task_id": "toy-1"}])
        await worker.through("init")
        (lost,) = await worker.lease("run")
        (again,) = await HandWorker(link, "w-2-b").lease("run", wait_s=10)
        assert again["rollout_id"] == lost["rollout_id"]
        assert (await worker.heartbeat([lost["lease_id"]]))["revoked"][0]["lease_id"] == lost["lease_id"]


async def test_cancelled_rollouts_are_revoked_at_the_next_heartbeat(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        (group,) = await trainer.submit([{"task_id": "toy-1"}], group_size=2)
        await worker.through("init")
        first, second = await worker.lease("run")
        await trainer.cancel(rollout_id=first["rollout_id"])
        beat = await worker.heartbeat([first["lease_id"], second["lease_id"]])
        assert beat["renewed"] == [second["lease_id"]]
        assert [revoked["lease_id"] for revoked in beat["revoked"]] == [first["lease_id"]]
        with pytest.raises(ServiceError) as caught:
            await trainer.cancel(rollout_id=first["rollout_id"])
        assert caught.value.status == 409
        await trainer.cancel(group_id=group["group_id"])
        lines, _ = await trainer.results(0, wait_s=5)
        assert lines[0]["closed_by"] == "cancelled"
        assert (await trainer.rollout(first["rollout_id"]))["state"] == "cancelled"
        with pytest.raises(ServiceError) as caught:
            await trainer.trajectory(first["rollout_id"])
        assert caught.value.status == 404


async def test_sessions_are_sticky_balanced_and_end_with_the_attempt(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        for name in ("a", "b"):
            body = {"url": f"http://127.0.0.1:9/{name}", "model": "m", "capacity": 8, "id": name}
            await link.call("POST", "/v1/replicas", body, answer=bytes)
        await trainer.submit([{"task_id": "toy-1"}], group_size=4)
        await worker.through("init")
        leases = await worker.lease("run")
        seen: dict[str, int] = {}
        for lease in leases:
            body = {"rollout_id": lease["rollout_id"], "attempt": 1}
            first = await link.call("POST", "/v1/sessions", body, answer=dict[str, Any])
            assert await link.call("POST", "/v1/sessions", body, answer=dict[str, Any]) == first
            assert lease["input"]["session"] == first, "the lease came with it: its worker need not ask"
            seen[first["replica_id"]] = seen.get(first["replica_id"], 0) + 1
        assert seen == {"a": 2, "b": 2}
        await worker.commit(leases[0])
        fleet = {replica["id"]: replica["sessions"] for replica in (await trainer.status())["fleet"]}
        assert sum(fleet.values()) == 3
        with pytest.raises(ServiceError) as caught:
            await link.call("POST", "/v1/sessions", {"rollout_id": leases[1]["rollout_id"], "attempt": 7}, answer=bytes)
        assert caught.value.code == "superseded"


BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/rollouts", {"tasks": []}, 400, "tasks"),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "group_size": 0}, 400, "group_size"),
    ("POST", "/v1/rollouts", {"tasks": [{"data": {}}]}, 400, "task_id"),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "nobody"}]}, 400, "tasks[0].task_id"),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "x", "data": {"question": "explode"}}]}, 400, "no such thing"),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "grop_size": 2}, 400, "grop_size"),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "min_usable": 2}, 400, "min_usable"),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "priority": 101}, 400, "priority"),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "sampling": {"top_p": 0}}, 400, "top_p"),
    ("POST", "/v1/rollouts", b"{nonsense", 400, "body"),
    ("GET", "/v1/rollouts/nobody", None, 404, "nobody"),
    ("GET", "/v1/groups/nobody", None, 404, "nobody"),
    ("DELETE", "/v1/rollouts/nobody", None, 404, "nobody"),
    ("DELETE", "/v1/groups/nobody", None, 404, "nobody"),
    ("GET", "/v1/trajectories/nobody", None, 404, "nobody"),
    ("GET", "/v1/results?after=minus", None, 400, "after"),
    ("GET", "/v1/results?wait_s=nan", None, 400, "wait_s"),
    ("GET", "/v1/results?limit=0", None, 400, "limit"),
    ("POST", "/v1/policy", {"version": 0}, 409, "version"),
    ("POST", "/v1/policy", {"version": "x"}, 400, "version"),
    ("POST", "/v1/lease", {}, 403, "worker"),
    ("POST", "/v1/commit", {}, 403, "worker"),
    ("GET", "/v1/nothing", None, 404, "no route"),
    ("PATCH", "/v1/rollouts", None, 404, "no route"),
    ("POST", "/run", {}, 404, "compat.nemo_gym=true"),
    ("POST", "/process", {}, 404, "compat.prorl=true"),
    ("GET", "/", None, 501, "not built"),
    (
        "POST",
        "/v1/rollouts",
        {"tasks": [{"task_id": "toy-1"}], "callback_url": "http://x/"},
        400,
        "callbacks.allow",
    ),
    ("POST", "/v1/policy", {"version": 3, "weights_path": "/nowhere/at/all"}, 400, "/nowhere/at/all"),
    ("GET", "/v1/rollouts?after=nowhere", None, 400, "after"),
    ("GET", "/v1/events?after=-1", None, 400, "after"),
]


async def test_every_bad_request_gets_its_code_and_names_what_is_wrong(layout: RunLayout) -> None:
    async with routed(layout), httpx.AsyncClient() as client:
        found = beacon.read(layout)
        assert found is not None
        token = layout.trainer_token.read_text()
        for method, path, body, status, says in BAD:
            content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            answer = await client.request(
                method, found.url + path, content=content,
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )  # fmt: skip
            assert answer.status_code == status, (method, path, body, answer.text)
            error = answer.json()["error"]
            assert says in error["message"] and error["code"] and isinstance(error["detail"], dict)


async def test_tokens_are_needed_and_have_one_role_each(layout: RunLayout) -> None:
    async with routed(layout), httpx.AsyncClient() as client:
        found = beacon.read(layout)
        assert found is not None
        worker = layout.worker_token.read_text()
        headers: list[tuple[dict[str, str], int]] = [
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": worker}, 401),
            ({"Authorization": f"Bearer {worker}"}, 403),
        ]
        for header, status in headers:
            assert (await client.get(f"{found.url}/v1/results", headers=header)).status_code == status
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(found.url + path)).status_code == 200
    assert all(path.stat().st_mode & 0o077 == 0 for path in [layout.secrets, *layout.secrets.iterdir()])


async def test_an_idempotency_key_accepts_one_body_once(layout: RunLayout) -> None:
    async with routed(layout), AsyncRolloutClient(layout.root) as trainer:
        first = await trainer.submit([{"task_id": "toy-1"}], idempotency_key="once")
        assert await trainer.submit([{"task_id": "toy-1"}], idempotency_key="once") == first
        with pytest.raises(ServiceError) as caught:
            await trainer.submit([{"task_id": "toy-2"}], idempotency_key="once")
        assert (caught.value.status, caught.value.code) == (409, "idempotency_conflict")
        assert (await trainer.status())["rollouts"]["accepted"] == 1


async def test_more_than_admission_allows_is_429_with_retry_after(layout: RunLayout) -> None:
    async with routed(layout, max_open=3), httpx.AsyncClient() as client, AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit([{"task_id": "toy-1"}], group_size=3)
        found = beacon.read(layout)
        assert found is not None
        answer = await client.post(
            f"{found.url}/v1/rollouts", json={"tasks": [{"task_id": "toy-2"}]},
            headers={"Authorization": f"Bearer {layout.trainer_token.read_text()}"},
        )  # fmt: skip
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1


async def test_submissions_that_come_together_do_not_pass_the_bound_together(layout: RunLayout) -> None:
    async with routed(layout, max_open=3), httpx.AsyncClient() as client:
        found = beacon.read(layout)
        assert found is not None
        headers = {"Authorization": f"Bearer {layout.trainer_token.read_text()}"}
        body = {"tasks": [{"task_id": "toy-1"}], "group_size": 3}
        asked = (client.post(f"{found.url}/v1/rollouts", json=body, headers=headers) for _ in range(4))
        assert sorted(answer.status_code for answer in await asyncio.gather(*asked)) == [202, 429, 429, 429]


async def test_the_oracle_alone_is_given_private_columns(layout: RunLayout) -> None:
    async with routed(layout, privileged=True) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        await trainer.submit([{"task_id": "toy-1"}])
        (init,) = await worker.lease("init")
        assert "answer" not in init["input"]["payload"]
        await worker.commit(init)
        (run,) = await worker.lease("run")
        assert run["input"]["payload"]["answer"] == 2


async def test_results_that_claim_bytes_must_bring_them(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        worker = HandWorker(link, "w-1-a")
        await trainer.submit([{"task_id": "toy-1"}])
        (init,) = await worker.lease("init")
        with pytest.raises(ServiceError) as caught:
            await worker.commit(init, layer=None)
        assert caught.value.status == 400 and "layer" in str(caught.value)
        assert await worker.commit(init) == "ok"


async def test_status_from_files_equals_status_by_http(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit([{"task_id": "toy-1"}], group_size=2)
        await HandWorker(link, "w-1-a").through("init")
        live = await trainer.status()
    files = read_status(layout)
    for key in ("run_id", "stages", "rollouts", "groups", "init", "seq"):
        assert files[key] == live[key]


async def test_metrics_have_the_contracts_names(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit([{"task_id": "toy-1"}])
        worker = HandWorker(link, "w-1-a")
        for stage in ("init", "run", "eval"):
            await worker.through(stage)
        text = (await link.call("GET", "/metrics", answer=bytes)).decode()
    assert 'rollmill_rollouts_total{status="completed",class="ok"} 1' in text
    for stage in ("init", "run", "eval"):
        assert f'rollmill_stage_seconds_count{{stage="{stage}"}} 1' in text
    for name in ("stage_queued", "stage_leased", "tokens_total", "reward", "policy_version", "infra_failure_ratio"):
        assert f"rollmill_{name}" in text


async def test_a_link_without_a_router_says_what_it_looked_for(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "lonely")
    async with RouterLink("worker", run_dir=layout.root, patience_s=0.2) as link:
        with pytest.raises(StageError, match="router"):
            await link.call("GET", "/healthz", answer=bytes)
    with pytest.raises(StageError, match="no run directory"):
        await fetch_status(layout.root)


async def test_a_fenced_router_acknowledges_nothing(layout: RunLayout) -> None:
    """The next epoch is claimed while this router lives: its next acknowledgement must not come."""
    with pytest.raises(ExceptionGroup):
        async with routed(layout) as link, AsyncRolloutClient(layout.root, patience_s=1) as trainer:
            claim(layout, link.epoch + 1, "another")
            with pytest.raises(StageError):
                await trainer.submit([{"task_id": "toy-1"}])


async def test_a_submission_without_a_key_is_accepted_once_however_often_its_answer_is_lost(layout: RunLayout) -> None:
    async with routed(layout), AsyncRolloutClient(layout.root) as trainer:
        real, sent = trainer._link._client.request, []

        async def losing(*args: Any, **kwargs: Any) -> Any:
            answer = await real(*args, **kwargs)
            sent.append(kwargs)
            if len(sent) == 1:
                raise ReadError("the answer was lost")
            return answer

        trainer._link._client.request = losing  # type: ignore[method-assign]
        (group,) = await trainer.submit([{"task_id": "toy-1"}])
        assert len(sent) >= 2
        assert (await trainer.group(group["group_id"]))["state"] == "open"
        assert (await trainer.status())["rollouts"]["accepted"] == 1


async def test_work_is_not_given_to_who_has_hung_up_or_died(layout: RunLayout) -> None:
    async with routed(layout) as link, AsyncRolloutClient(layout.root) as trainer:
        ghost, alive = HandWorker(link, "ghost-1-a"), HandWorker(link, "alive-1-b")
        hung_up = asyncio.create_task(ghost.lease("init", wait_s=30))
        await asyncio.sleep(0.2)
        hung_up.cancel()
        async with RouterLink("worker", run_dir=layout.root) as other:
            await other.locate()
            dead = asyncio.create_task(HandWorker(other, "dead-1-c").lease("init", wait_s=30))
            await asyncio.sleep(0.2)
            await link.call("DELETE", "/v1/members/dead-1-c", answer=bytes)
            await trainer.submit([{"task_id": "toy-1"}])
            assert len(await alive.lease("init", wait_s=5)) == 1
            with pytest.raises(ServiceError, match="reported dead"):
                await dead


async def test_draining_outlives_the_router_and_ends_with_its_request(layout: RunLayout) -> None:
    async with routed(layout) as link:
        await link.call("POST", "/v1/drain", answer=bytes)
    async with routed(layout), AsyncRolloutClient(layout.root) as trainer:

        async def draining() -> bool:
            return bool((await trainer.status())["state"] == "draining")

        await eventually(draining, "the next router drains too")
        control.clear(layout)

        async def running() -> bool:
            return bool((await trainer.status())["state"] == "running")

        await eventually(running, "the run goes on once nobody asks any more")


HOSTILE: list[tuple[str, str, Any, int]] = [
    ("POST", "/v1/replicas", {"url": "http://[::1"}, 400),
    ("POST", "/v1/replicas", {"url": "http://h:1/x y"}, 400),
    ("POST", "/v1/replicas", {"url": "http://h:1", "id": 'a"} 1\nb'}, 400),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "sampling": {"seed": 2**70}}, 400),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "sampling": {"max_tokens": 2**40}}, 400),
    ("POST", "/v1/rollouts", {"tasks": [{"task_id": "toy-1"}], "group_size": 65_536}, 413),
    ("POST", "/v1/policy", {"version": 2**70}, 400),
    ("GET", f"/v1/rollouts?after=open:{'9' * 5000}", None, 400),
    ("GET", f"/v1/results?after={'9' * 5000}", None, 400),
]


async def test_hostile_values_are_refused_and_leave_the_router_well(layout: RunLayout) -> None:
    async with routed(layout) as link, httpx.AsyncClient() as client:
        found = beacon.read(layout)
        assert found is not None
        for method, path, body, status in HOSTILE:
            answer = await client.request(
                method, found.url + path, content=None if body is None else json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {layout.trainer_token.read_text()}"},
            )  # fmt: skip
            assert answer.status_code == status, (path[:60], answer.text)
        for commit in ({"lease_id": "9" * 5000}, {"lease_id": "1", "segment": {"path": "../x"}}):
            whole = {"rollout_id": "r", "attempt": 1, "outcome": "ok", **commit}
            if "segment" in whole:
                whole["segment"] = {"path": "../x", "offset": 0, "length": 1, "crc32": 0}
            with pytest.raises(ServiceError) as caught:
                await link.call("POST", "/v1/commit", {"member": "w", "epoch": 1, "commits": [whole]}, answer=bytes)
            assert caught.value.status == 400
        await link.call("GET", "/readyz", answer=bytes)
