"""agent.harness=openai_tools: a loop of tool calls on OpenAI's own client, run in the sandbox. Sent there as text.

`python openai_tools.py TASK` with the gateway in OPENAI_BASE_URL and OPENAI_API_KEY. Of the task's tools it offers
those that it has: bash. It shows what a harness of one's own can be: all that it needs of rollmill are two variables.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OUTPUT_CHARACTERS = 16 * 1024
NAMES = ("bash",)


def run_bash(arguments: dict[str, Any], timeout_s: float) -> str:
    """Output and exit code of one command; a shell of its own for each."""
    try:
        done = subprocess.run(
            ["/bin/bash", "-c", str(arguments.get("command", ""))], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return f"{shorten(error.output or b'')}\n[not done within {timeout_s:g} s]"
    said = shorten(done.stdout)
    return said if done.returncode == 0 else f"{said}\n[exit code {done.returncode}]"


def shorten(output: bytes) -> str:
    """The text, or its head and tail."""
    text = output.decode("utf-8", "replace")
    half = OUTPUT_CHARACTERS // 2
    return text if len(text) <= OUTPUT_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"


def result_of(call: Any, timeout_s: float) -> str:
    """What the policy reads of one call; its own mistakes come back as text."""
    if call.function.name not in NAMES:
        return f"error: no tool is called {call.function.name!r}; the tools are: {', '.join(NAMES)}"
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    return run_bash(arguments, timeout_s)


def main() -> None:
    """Work until the policy answers without a call; the gateway ends what goes on for too long."""
    task = json.loads(Path(sys.argv[1]).read_text())
    timeout_s = float(os.environ.get("ROLLMILL_TURN_TIMEOUT_S", "30"))
    tools = [tool for tool in task["tools"] if tool["function"]["name"] in NAMES]
    client = importlib.import_module("openai").OpenAI(max_retries=4)
    messages: list[Any] = task["messages"]
    more = {"tools": tools} if tools else {}
    while True:
        answer = client.chat.completions.create(model=os.environ["ROLLMILL_MODEL"], messages=messages, **more)
        reply = answer.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": result_of(call, timeout_s)}
            for call in reply.tool_calls
        ]


if __name__ == "__main__":
    main()
