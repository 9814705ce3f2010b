"""An agent that looks for words everywhere it can, on both sides of its sandbox, and says where it has found them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from sandbox.protocols import Sandbox
from stages.protocols import Limits, Model, Row, Task
from stages.shards import ShardReader
from stages.trajectory import Message


def nothing_is_left_of(words: Sequence[str], run_dir: Path) -> None:
    """Searchers have found none of the words, and neither hand-off nor logs nor stored messages hold one."""
    rows = list(ShardReader(run_dir))
    assert rows
    for row in rows:
        (said,) = [message for message in json.loads(row["messages"]) if message["role"] == "assistant"]
        assert json.loads(said["content"]) == []
        assert not any(word in row["messages"] for word in words)
    logs = [path for path in (run_dir / "logs").rglob("*") if path.is_file()]
    assert logs
    for path in (*logs, *(run_dir / "handoff").glob("*")):
        assert not any(word.encode() in path.read_bytes() for word in words), path


class Searcher:
    """Searches its row, its worker's environment and command line, and all that can be read in the sandbox.

    Args:
        task: gives prompt and tools.
        words: to look for, separated by spaces; written so that the search does not find itself.
    """

    name = "searcher"
    privileged = False

    def __init__(self, task: Task, words: str) -> None:
        self._task, self._words = task, words.split()

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        """Search, and say what was found as a JSON list."""
        prompt, tools = self._task.prompt(row), self._task.tools(row)
        outside = {
            "row": repr(row), "prompt": repr(prompt), "tools": repr(tools), "environ": repr(dict(os.environ)),
            "process": Path("/proc/self/environ").read_bytes().decode(errors="replace"),
        }  # fmt: skip
        found = [f"{place}: {word}" for place, text in outside.items() for word in self._words if word in text]
        patterns = " ".join(f"-e '[{word[0]}]{word[1:]}'" for word in self._words)
        inside = await sandbox.shell.run(
            # Of the image's own /usr, gigabytes, only what has changed since, what is mounted there, and /usr/local.
            "{ find / '(' -path /proc -o -path /sys -o -path /dev -o -path /usr ')' -prune -o -type f -print0\n"
            "find /usr -path /usr/local -prune -o -type f -mmin -60 -print0\n"
            "find /usr/local $(cut -d' ' -f2 /proc/self/mounts | grep ^/usr/) -type f -print0\n"
            f"}} 2>/dev/null | xargs -0r grep -la {patterns} 2>/dev/null\n"
            f"grep -la {patterns} /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; true",
            timeout_s=100,
        )
        assert not inside.timed_out
        found += inside.output.split()
        model.say(messages=prompt, reply=Message("assistant", json.dumps(found)), tools=tools)
