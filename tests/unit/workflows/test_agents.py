"""The agents' loops against a scripted model and real bash."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stages.errors import PolicyTimeoutError
from stages.protocols import Agent, Limits, ResumableAgent
from stages.trajectory import Message, ToolCall
from tests.support.models import ScriptedModel
from tests.support.sandboxes import DirectorySandbox
from workflows.agents.nop import NopAgent
from workflows.agents.oracle import OracleAgent
from workflows.agents.tools import ToolsAgent
from workflows.tasks.arith import ArithTask

TASK = ArithTask(limit=20, file_fraction=0.5)
PLAIN = {"task_id": "plain", "question": "12 + 7 - 4 = ?", "answer": 15}
FILED = {
    "task_id": "filed",
    "question": "x + 7 = ? See numbers.txt.",
    "answer": 19,
    "files": {"/work/numbers.txt": "x=12\n"},
}


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


def run(agent: Agent, row, replies, directory: Path, limits: Limits | None = None):
    model, sandbox = ScriptedModel(replies), DirectorySandbox(directory)

    async def both() -> None:
        await TASK.prepare(sandbox, row)
        sandbox.commands.clear()
        sandbox.timeouts_s.clear()
        await agent.run(row, model, sandbox, limits or Limits())

    asyncio.run(both())
    return model, sandbox


def reward(row, model: ScriptedModel) -> float:
    return asyncio.run(TASK.verify(None, row, model.trajectory())).value


def test_agents_are_agents():
    assert all(isinstance(kind(TASK), Agent) for kind in (ToolsAgent, OracleAgent, NopAgent))
    assert [kind.privileged for kind in (ToolsAgent, OracleAgent, NopAgent)] == [False, True, False]


def test_reads_the_file_then_calculates_then_answers(tmp_path: Path):
    replies = [call("cat numbers.txt"), call("echo $((12+7))"), "The answer is 19."]
    model, sandbox = run(ToolsAgent(TASK), FILED, replies, tmp_path, Limits(turn_timeout_s=3.0))
    assert sandbox.commands == ["cat numbers.txt", "echo $((12+7))"]
    assert sandbox.timeouts_s == [3.0, 3.0]
    assert [message.role for message in model.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert [message.content for message in model.messages if message.role == "tool"] == ["x=12", "19"]
    assert reward(FILED, model) == 1.0
    assert all(tools == TASK.tools(FILED) for _, tools in model.asked)


def test_each_question_to_the_model_continues_the_one_before(tmp_path: Path):
    replies = [call("cat numbers.txt"), call("echo 1"), "done"]
    model, _ = run(ToolsAgent(TASK), FILED, replies, tmp_path)
    for (before, _), (after, _) in zip(model.asked, model.asked[1:], strict=False):
        assert after[: len(before)] == before
        assert len(after) == len(before) + 2


def test_several_calls_run_in_order_with_one_tool_message_each(tmp_path: Path):
    replies = [call("echo one > log") + call("cat log; echo two"), "The answer is 15."]
    model, sandbox = run(ToolsAgent(TASK), PLAIN, replies, tmp_path)
    results = [message for message in model.messages if message.role == "tool"]
    assert [message.content for message in results] == ["", "one\ntwo"]
    assert [message.tool_call_id for message in results] == ["call_0", "call_1"]
    assert len(sandbox.commands) == 2


def test_malformed_and_unknown_calls_come_back_as_text(tmp_path: Path):
    unknown = Message("assistant", tool_calls=(ToolCall("python", {"code": "1"}, "call_0"),))
    replies = ["<tool_call>\n{bad\n</tool_call>", unknown, call(""), "The answer is 15."]
    model, sandbox = run(ToolsAgent(TASK), PLAIN, replies, tmp_path)
    results = [message.content for message in model.messages if message.role == "tool"]
    assert sandbox.commands == []
    assert results[0].startswith("malformed tool call: not JSON") and "{bad" in results[0]
    assert results[1] == "error: no tool is called 'python'; the tools are: bash"
    assert results[2] == "error: command is empty"
    assert reward(PLAIN, model) == 1.0


def test_turns_are_bounded(tmp_path: Path):
    with pytest.raises(PolicyTimeoutError, match="after 3 turns") as caught:
        run(ToolsAgent(TASK), PLAIN, [call("true")] * 9, tmp_path, Limits(max_turns=3))
    assert caught.value.failure_class == "policy_timeout"


def test_a_tool_that_the_task_does_not_offer_does_not_run(tmp_path: Path):
    class Bare(ArithTask):
        def tools(self, row):
            return []

    model, sandbox = run(ToolsAgent(Bare()), PLAIN, [call("echo 1"), "done"], tmp_path)
    assert sandbox.commands == []
    assert "no tool is called 'bash'" in model.asked[1][0][-1].content


@pytest.mark.parametrize("row", [PLAIN, FILED])
def test_the_oracle_earns_everything_and_nop_nothing(tmp_path: Path, row):
    oracle, _ = run(OracleAgent(TASK), row, [], tmp_path)
    nop, sandbox = run(NopAgent(TASK), row, [], tmp_path)
    assert (reward(row, oracle), reward(row, nop)) == (1.0, 0.0)
    assert sandbox.commands == []
    for model in (oracle, nop):
        [(messages, reply, tools)] = model.said
        assert messages == TASK.prompt(row) and tools == TASK.tools(row) and reply.role == "assistant"
        assert model.asked == []


@pytest.mark.parametrize("stopped_after", range(1, 6))
def test_a_conversation_that_stopped_anywhere_goes_on_as_if_it_had_not(tmp_path: Path, stopped_after: int):
    replies = [call("cat numbers.txt"), call("echo $((12+7))"), "The answer is 19."]
    (tmp_path / "whole").mkdir()
    whole, _ = run(ToolsAgent(TASK), FILED, replies, tmp_path / "whole")
    agent = ToolsAgent(TASK)
    assert isinstance(agent, ResumableAgent) and not isinstance(NopAgent(TASK), ResumableAgent)
    history = whole.messages[: 1 + stopped_after]
    spoken = sum(message.role == "assistant" for message in history)
    model, sandbox = ScriptedModel(replies[spoken:]), DirectorySandbox(tmp_path)

    async def both() -> None:
        await TASK.prepare(sandbox, FILED)
        await agent.resume(FILED, model, sandbox, Limits(max_turns=3), history)

    asyncio.run(both())
    assert model.messages[-1] == whole.messages[-1]
    assert [m.content for m in model.messages] == [m.content for m in whole.messages]


def test_turns_before_the_stop_count_against_the_limit(tmp_path: Path):
    (tmp_path / "whole").mkdir()
    whole, _ = run(ToolsAgent(TASK), PLAIN, [call("echo 1"), call("echo 2"), "done"], tmp_path / "whole")
    model, sandbox = ScriptedModel(["done"]), DirectorySandbox(tmp_path)
    with pytest.raises(PolicyTimeoutError, match="after 2 turns"):
        asyncio.run(ToolsAgent(TASK).resume(PLAIN, model, sandbox, Limits(max_turns=2), whole.messages[:-1]))
    assert model.asked == []
