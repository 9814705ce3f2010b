"""The bash tool: what the agent reads of results and of its own mistakes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.protocols import CommandResult
from tests.support.sandboxes import DirectorySandbox
from workflows.tools import bash


def observed(output: str = "", exit_code: int = 0, **flags: bool) -> str:
    return bash.observation(CommandResult(exit_code, output, "/work", 0.1, **flags), 30.0)


def test_output_is_given_as_it_is_without_its_last_newline():
    assert observed("15\n") == "15"
    assert observed("  a\n\nb\n\n") == "  a\n\nb\n"
    assert observed("") == ""


def test_what_is_out_of_the_ordinary_is_said():
    assert observed("no\n", 2) == "no\n[exit code 2]"
    assert observed("", 1) == "[exit code 1]"
    late = observed("part\n", 124, timed_out=True)
    assert late.startswith("part\n[stopped after 30 s") and "exit code" not in late
    assert "too long" in observed("a...b\n", truncated=True)
    assert "restarted" in observed("", 137, timed_out=True, restarted=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "got nothing"),
        ({"command": 3}, "got int"),
        ({"command": "  "}, "empty"),
        ({"command": "a\x00b"}, "NUL"),
        ({"command": "ls", "cwd": "/"}, "got cwd"),
    ],
)
def test_wrong_arguments_are_answered_and_nothing_runs(tmp_path: Path, arguments, said: str):
    sandbox = DirectorySandbox(tmp_path)
    text = asyncio.run(bash.call(sandbox, arguments, 5.0))
    assert text.startswith("error: ") and said in text
    assert sandbox.commands == []


def test_a_call_runs_with_its_deadline(tmp_path: Path):
    sandbox = DirectorySandbox(tmp_path)
    assert asyncio.run(bash.call(sandbox, {"command": "echo $((12+7-4)); exit 3"}, 7.0)) == "15\n[exit code 3]"
    assert sandbox.timeouts_s == [7.0]
