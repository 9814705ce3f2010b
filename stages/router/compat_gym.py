"""NeMo Gym's agent contract: POST /run takes a row of its data set and answers with the row of a finished rollout.

A rollout that failed comes back masked, with the class of its failure and no tokens. One that was cancelled, or whose
router leaves, is answered by an error and no row: it never happened, and the collector asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from stages.errors import ServiceError
from stages.router.auth import Role
from stages.router.compat_prorl import Parts, finished, off, sampling_of, task_of
from stages.router.openapi import Spec
from stages.router.requests import answer, parse, read_body
from stages.web import Request, Response
from stages.wire import RolloutsIn

GymRow = Callable[[Any, int, int], dict[str, Any] | None]
"""Makes the answer of a committed row (a ShardRow), its task index and its rollout index; None where it cannot."""
TAG: Final = "nemo-gym"
_ASKED: Final = "responses_create_params"
_OWN: Final = frozenset({"task_id", _ASKED, "agent_ref"})


class Gym:
    """The handler."""

    def __init__(self, parts: Parts, gym_row: GymRow) -> None:
        self._parts, self._row = parts, gym_row

    async def run(self, request: Request) -> Response:
        """One rollout; the answer is the request's row with response, reward and mask."""
        row = parse(await read_body(request), dict[str, Any])
        params = row.get(_ASKED)
        if not isinstance(params, dict):
            raise ServiceError(400, "invalid", f"{_ASKED}: an object is needed", field=_ASKED)
        data = {name: value for name, value in row.items() if name not in _OWN and not name.startswith("_ng_")}
        if data and "question" not in data and (question := _question(params)):
            data["question"] = question
        name = (
            row.get("task_id") or hashlib.sha256(msgspec.json.encode(data or params, order="sorted")).hexdigest()[:16]
        )
        if not data and "task_id" not in row:
            data = {"question": _question(params)}
        wanted = RolloutsIn(
            tasks=[task_of(data, name, frozenset(), "task_id")], tag=TAG, sampling=sampling_of(params, _ASKED)
        )
        accepted = await self._parts.rollouts.submit(wanted, None, b"")
        line = await finished(self._parts, request, accepted.groups[0].group_id, cancel=True)
        if line["status"] == "cancelled":
            raise ServiceError(503, "cancelled", f"rollout {line['rollout_id']} was cancelled", retry_after_s=1)
        return answer(row | await self._result(line, row, params))

    async def _result(self, line: dict[str, Any], row: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        numbers = [row.get(key) for key in ("_ng_task_index", "_ng_rollout_index")]
        task_index, rollout_index = (number if isinstance(number, int) else 0 for number in numbers)
        if not line["mask_sample"]:
            made = await asyncio.to_thread(self._read, line, task_index, rollout_index)
            if made is not None:
                return {**made, _ASKED: params} | {key: row[key] for key in row if key.startswith("_ng_")}
        response = {
            "id": f"resp_{line['rollout_id']}", "object": "response", "created_at": time.time(), "model": "",
            "output": [], "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
        return {
            "response": response, "reward": 0.0, "mask_sample": True, "failure_class": line["failure_class"],
            "rollout_id": line["rollout_id"], "group_id": line["group_id"], "task_id": line["task_id"],
        }  # fmt: skip

    def _read(self, line: dict[str, Any], task_index: int, rollout_index: int) -> dict[str, Any] | None:
        from stages.shards.index import RowsLine, line_from
        from stages.shards.reader import ShardReader  # brings pyarrow along, for which no router's start waits

        known = line_from(line, f"seq {line['seq']}")
        assert isinstance(known, RowsLine)
        with ShardReader(self._parts.router.layout.root, visibility_s=5.0) as reader:
            return self._row(reader.read(known), task_index, rollout_index)


def _question(params: dict[str, Any]) -> str:
    """What the user asked last: the row of a task that needs nothing more."""
    asked = params.get("input")
    if isinstance(asked, str):
        return asked
    for item in reversed(asked if isinstance(asked, list) else []):
        if isinstance(item, dict) and item.get("role") == "user":
            content = item.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return ""


def specs(parts: Parts, roles: frozenset[Role], gym_row: GymRow | None) -> list[Spec]:
    """The route; where it is off it says which key switches it on."""
    if gym_row is None:
        return [off("POST", "/run", roles, "one rollout", "compat.nemo_gym")]
    return [Spec("POST", "/run", Gym(parts, gym_row).run, roles, "one rollout")]
