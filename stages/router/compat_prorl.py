"""ProRL Agent's routes for its existing clients: one blocking call a trajectory, engines added and cleared by address.

Names and shapes are those of that project's published description of its server. Its clients send no header of their
own: give them the trainer's token in the address, `http://trainer:TOKEN@host:port`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any, Final, NamedTuple

import msgspec

from stages.errors import ServiceError
from stages.router.auth import Role
from stages.router.core import Router
from stages.router.openapi import Spec
from stages.router.replicas import Replicas
from stages.router.requests import answer, parse, read_body
from stages.router.rollouts import Rollouts
from stages.router.views import stages_view
from stages.web import Request, Response
from stages.wire import ReplicaIn, RolloutsIn, SamplingIn, TaskIn

TAG: Final = "prorl"
JOBS_KEPT: Final = 100_000
_NAMES: Final = frozenset({"instance_id", "trajectory_id", "data_source"})
"""What an instance says of itself; anything beyond is the row."""
_MAX_TOKENS: Final = ("max_output_tokens", "max_tokens", "max_completion_tokens")


class Parts(NamedTuple):
    """What of the router other systems' routes are made of."""

    router: Router
    rollouts: Rollouts
    replicas: Replicas


class ProcessIn(msgspec.Struct, frozen=True):
    """POST /process. Of `sampling_params` temperature, top_p, seed and the bound on tokens are taken."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = {}
    job_id: str | None = None


class CancelIn(msgspec.Struct, frozen=True):
    """POST /cancel."""

    job_id: str


class ServerIn(msgspec.Struct, frozen=True):
    """POST /add_llm_server."""

    address: str


def sampling_of(params: dict[str, Any], where: str) -> SamplingIn:
    """What a foreign client's parameters change of the configured ones; what we have no word for is left out.

    Raises:
        ServiceError: 400, one is out of its range.
    """
    taken = {name: params[name] for name in ("temperature", "top_p", "seed") if params.get(name) is not None}
    bound = next((params[name] for name in _MAX_TOKENS if params.get(name) is not None), None)
    if bound is not None:
        taken["max_tokens"] = bound
    try:
        return msgspec.convert(taken, SamplingIn)
    except msgspec.ValidationError as error:
        raise ServiceError(400, "invalid", f"{where}: {error}", field=where) from error


def task_of(data: dict[str, Any], name: Any, own: frozenset[str], where: str) -> TaskIn:
    """A task by name; with data of its own where there is anything beyond what names it."""
    try:
        return msgspec.convert({"task_id": str(name), "data": data if data.keys() - own else None}, TaskIn)
    except msgspec.ValidationError as error:
        raise ServiceError(400, "invalid", f"{where}: {error}", field=where) from error


async def finished(parts: Parts, request: Request, group_id: str, *, cancel: bool) -> dict[str, Any]:
    """The row's index line of a group of one, waited for; a caller that has left takes its rollout with it.

    Raises:
        ServiceError: 503, the router leaves before the end.
    """
    publisher, left = parts.router.publisher, asyncio.ensure_future(_left(request))
    try:
        while publisher.seq_of_group(group_id) is None:
            if parts.router.stopping:
                raise ServiceError(503, "restarting", "the router is leaving: ask again", retry_after_s=2)
            if left.done():
                if cancel and group_id in parts.router.ledger.state.groups:
                    await parts.rollouts.cancel(group_id=group_id)
                raise ServiceError(503, "gone", "the caller has left")
            more = asyncio.ensure_future(publisher.wait_for_more(publisher.published, 5.0))
            await asyncio.wait({more, left}, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
        seq = publisher.seq_of_rollout(f"{group_id}-0")
        assert seq is not None
        return await publisher.line(seq)
    finally:
        left.cancel()


async def _left(request: Request) -> None:
    while not await request.is_disconnected():  # noqa: ASYNC110 - the server offers nothing to wait on
        await asyncio.sleep(0.5)


class ProRL:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._started = True
        self._jobs: dict[str, str] = {}
        self._open: set[str] = set()

    async def start(self, request: Request) -> Response:
        """Take jobs from now on."""
        self._started = True
        return answer({"status": "Server started successfully"})

    async def stop(self, request: Request) -> Response:
        """Take no more jobs, and end those that are open."""
        self._started = False
        for job_id in list(self._open):
            await self._cancel(job_id)
        return answer({"status": "Server stopped successfully"})

    async def status(self, request: Request) -> Response:
        """Whether jobs are taken, what is queued and active in each stage, and the engines."""
        stages = stages_view(self._parts.router.ledger)
        return answer(
            {
                "server_running": self._started,
                "jobs": len(self._open),
                "llm_servers": [f"{one['url']}/v1" for one in self._parts.replicas.listing()],
                **{f"{name}_queue_size": stage["queued"] for name, stage in stages.items()},
                **{f"active_{name}_jobs": stage["leased"] for name, stage in stages.items()},
            }
        )

    async def add_server(self, request: Request) -> Response:
        """Add an engine by its OpenAI base address; one that is there already is renewed."""
        address = parse(await read_body(request), ServerIn).address
        body = msgspec.json.encode({"url": address.rstrip("/").removesuffix("/v1")})
        await self._parts.replicas.join(parse(body, ReplicaIn))
        return answer({"status": f"Added LLM server address: {address}"})

    async def clear_servers(self, request: Request) -> Response:
        """Drain and remove all engines."""
        for one in self._parts.replicas.listing():
            await self._parts.replicas.leave(one["id"])
        return answer({"status": "Cleared all LLM server addresses"})

    async def process(self, request: Request) -> Response:
        """One trajectory, from the instance to its reward; the answer comes when all is done."""
        asked = parse(await read_body(request), ProcessIn)
        if not self._started:
            raise ServiceError(409, "not_started", "the server is stopped: POST /start first")
        instance = asked.instance
        name = instance.get("instance_id", instance.get("task_id"))
        if name is None:
            raise ServiceError(400, "invalid", "instance.instance_id: missing", field="instance.instance_id")
        job_id = asked.job_id or secrets.token_hex(8)
        wanted = RolloutsIn(
            tasks=[task_of(instance, name, _NAMES, "instance.instance_id")], tag=TAG,
            sampling=sampling_of(asked.sampling_params, "sampling_params"),
        )  # fmt: skip
        key = f"{TAG}-{asked.job_id}" if asked.job_id is not None else None
        accepted = await self._parts.rollouts.submit(wanted, key, msgspec.json.encode(wanted))
        group_id = accepted.groups[0].group_id
        self._jobs[job_id] = group_id
        while len(self._jobs) > JOBS_KEPT:
            del self._jobs[next(iter(self._jobs))]
        self._open.add(job_id)
        try:
            line = await finished(self._parts, request, group_id, cancel=asked.job_id is None)
            return answer({"job_id": job_id, **_names(instance, name), **await self._result(line)})
        finally:
            self._open.discard(job_id)

    async def cancel(self, request: Request) -> Response:
        """End an open job; its caller gets its answer with the error `cancelled`."""
        job_id = parse(await read_body(request), CancelIn).job_id
        if job_id not in self._jobs:
            known = self._parts.router.ledger.state.keys.get(f"{TAG}-{job_id}")  # accepted by an earlier router
            if known is None:
                raise ServiceError(404, "not_found", f"job_id {job_id[:200]!r} is not known")
            self._jobs[job_id] = known[1][0]
        await self._cancel(job_id)
        return answer({"status": f"Cancelled job: {job_id}", "job_id": job_id})

    async def _cancel(self, job_id: str) -> None:
        if self._jobs[job_id] in self._parts.router.ledger.state.groups:
            await self._parts.rollouts.cancel(group_id=self._jobs[job_id])

    async def _result(self, line: dict[str, Any]) -> dict[str, Any]:
        """The trajectory's fields; of one that failed the boundary that broke."""
        row = await self._parts.rollouts.trajectory(line["rollout_id"]) if line["shard"] is not None else {}
        failure = line["failure_class"]
        broken = failure if line["mask_sample"] else None
        return {
            "critical_error": broken,
            "success": broken is None,
            "resolved": line["reward"] is not None and line["reward"] >= 1.0,
            "finish": failure is None,
            "error": failure,
            "reward": line["reward"],
            "messages": json.loads(row.get("messages") or "[]"),
            "token_ids": row.get("token_ids", []),
            "loss_mask": row.get("loss_mask", []),
            "logprobs": row.get("logprobs", []),
            "prompt_length": row.get("prompt_length", 0),
            "policy_version": line["min_policy_version"],
            "mask_sample": line["mask_sample"],
            "timing": row.get("timing"),
            "rollout_id": line["rollout_id"],
        }


def _names(instance: dict[str, Any], name: Any) -> dict[str, Any]:
    return {"instance_id": name, "trajectory_id": instance.get("trajectory_id")}


def specs(parts: Parts, roles: frozenset[Role], *, on: bool) -> list[Spec]:
    """The routes; where they are off each says which key switches them on."""
    s = ProRL(parts)
    routes = [
        Spec("POST", "/start", s.start, roles, "take jobs"),
        Spec("POST", "/stop", s.stop, roles, "take no jobs, end those that are open"),
        Spec("GET", "/status", s.status, roles, "jobs and engines"),
        Spec("POST", "/add_llm_server", s.add_server, roles, "add an engine", ServerIn),
        Spec("POST", "/clear_llm_server", s.clear_servers, roles, "remove all engines"),
        Spec("POST", "/process", s.process, roles, "one trajectory", ProcessIn),
        Spec("POST", "/cancel", s.cancel, roles, "end a job", CancelIn),
    ]
    return routes if on else [off(spec.method, spec.path, roles, spec.about, "compat.prorl") for spec in routes]


def off(method: str, path: str, roles: frozenset[Role], about: str, key: str) -> Spec:
    """The route of a contract that this run does not offer."""

    async def refuse(request: Request) -> Response:
        raise ServiceError(404, "not_found", f"{method} {path}: start the run with {key}=true for this route")

    return Spec(method, path, refuse, roles, about)
