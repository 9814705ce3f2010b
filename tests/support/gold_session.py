"""A whole data set of task=swe through the gateway, with mini-swe-agent as it is on the package index.

`python -P -m tests.support.gold_session DATA PLACE [--embedded] [--limit N]` rolls out every row of DATA in PLACE/run
and prints how each ended. Without `--embedded` a scripted engine plays the session in which the gold patch is applied:
every row must be resolved. With it the tiny policy of the embedded engine does what it can: every row must come to an
end. The sandboxes have no network; the harness and the projects' wheels come from the package index once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from stages.chat import ChatTokenizer
from stages.shards import ShardReader
from tests.support.mock_engine import POLICY, MockEngine

SUBMIT: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What mini-swe-agent takes for the end of its work."""
CONTEXT: Final = 400_000
REPOSITORY: Final = Path(__file__).parents[2]


class _Asked(msgspec.Struct):
    token_ids: list[int]


class GoldEngine(MockEngine):
    """Says of each row what resolves it, call by call, to whoever's prompt holds its issue.

    Args:
        rows: in SWE-bench's columns.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._chat = ChatTokenizer.load(POLICY)
        self._rows = rows

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        if target == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": CONTEXT}]}
        if target != "/inference/v1/generate":
            return await super().answer(method, target, body)
        text = self._chat.decode(msgspec.json.decode(body, type=_Asked).token_ids)
        ids = [*self._chat.encode(self._next(text)), *self._chat.eos_ids]
        logprobs = [{"token_id": one, "logprob": -0.25} for one in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": logprobs},
                  "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}]}  # fmt: skip
        return 200, {"request_id": "generate-tokens-gold", "choices": [choice]}

    def _next(self, text: str) -> str:
        """The first message of the session that the prompt does not hold."""
        found = [row for row in self._rows if row["problem_statement"].strip() in text and row["repo"] in text]
        for said, command in session(max(found, key=lambda row: len(row["problem_statement"]))) if found else ():
            if said not in text:
                arguments = json.dumps({"name": "bash", "arguments": {"command": command}})
                return f"{said}\n<tool_call>\n{arguments}\n</tool_call>"
        return "There is nothing left to do."


def session(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is said, and what is run, in the session that resolves a row."""
    apply = f"git apply --whitespace=nowarn - <<'GOLD'\n{row['patch']}\nGOLD\n"
    return [("I change the source.", apply), ("I look at the change.", "git diff --stat"), ("I submit.", SUBMIT)]


@contextmanager
def serving(engine: MockEngine) -> Iterator[str]:
    """The engine in a thread of its own; its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(engine.start(), loop).result(30)
    try:
        yield engine.url
    finally:
        loop.call_soon_threadsafe(engine.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def roll_out(data: Path, place: Path, fleet: Sequence[str], *, limit: int | None, max_tokens: int) -> int:
    """The run's exit code; its rows lie in PLACE/run afterwards."""
    command = [
        sys.executable, "-P", "-m", "launch", "task=swe", f"task.path={data}", f"task.limit={limit or 'null'}",
        "agent=harness", "agent.harness=mini_swe_agent", "agent.max_turns=8", "group_size=1", "sandbox=bubblewrap",
        f"run_dir={place / 'run'}", f"sampling.max_tokens={max_tokens}", "pools.run.slots=2", "pools.eval.slots=2",
        "stuck_after_s=3600", *fleet,
    ]  # fmt: skip
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("place", type=Path)
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args(arguments)
    data, place = given.data.resolve(), given.place.resolve()
    wanted = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()][: given.limit]
    if given.embedded:
        code = roll_out(data, place, ["fleet=embedded"], limit=given.limit, max_tokens=512)
    else:
        with serving(GoldEngine(wanted)) as url:
            fleet = ["fleet=external", f"fleet.urls=[{url}]", "fleet.model=tiny"]
            code = roll_out(data, place, fleet, limit=given.limit, max_tokens=CONTEXT // 2)
    rows = {row["task_id"]: row for row in ShardReader(place / "run") if row["chain"] == 0}
    for name, row in sorted(rows.items()):
        sampled = sum(row["loss_mask"])
        exact = len(row["token_ids"]) == len(row["logprobs"]) and bool(row["policy_versions"]) == bool(sampled)
        end = row["failure_class"] or row["status"]
        sys.stdout.write(f"{name:32} {end:16} reward {row['reward']} turns {len(row['turns'])} sampled {sampled} "
                         f"{'exact' if exact else 'NOT EXACT'}\n")  # fmt: skip
    resolved = sum(row["reward"] == 1.0 for row in rows.values())
    sys.stdout.write(f"{len(rows)} of {len(wanted)} came to an end, {resolved} resolved\n")
    good = len(rows) == len(wanted) and (given.embedded or resolved == len(wanted))
    return 0 if good and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
