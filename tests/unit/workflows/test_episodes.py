"""The expert's episodes: what the policies were trained on is what rollouts are made of."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from stages.chat import ChatTokenizer
from stages.trajectory import Message, ToolCall
from workflows.policies import __file__ as policies_file
from workflows.policies import bpe, episodes
from workflows.tasks import sums
from workflows.tasks.arith import ArithTask

TINY = Path(policies_file).parent / "tiny"
ROWS = list(itertools.islice(sums.generate(5, "heldout", 0.5), 60))


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer.load(TINY)


def test_every_row_is_solved_by_the_expert(chat):
    for row in ROWS:
        play = episodes.Play(chat, row)
        play.start()
        answers = [play.follow(turn, max_turns=16) for turn in episodes.expert_turns(row)]
        assert answers[-1] is None and all(answers[:-1])
        assert play.solved
        assert len(answers) == (3 if "files" in row else 2)


def test_the_stream_is_the_rendering_and_the_mask_is_what_the_assistant_says(chat):
    for row in ROWS:
        ids, mask = episodes.expert_tokens(chat, row)
        play = episodes.Play(chat, row)
        play.start()
        for turn in episodes.expert_turns(row):
            play.follow(turn, max_turns=16)
        whole = chat.render(play.messages, episodes.TOOLS, add_generation_prompt=False)
        assert chat.decode(ids) == whole.removesuffix("\n")
        by_mask = itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
        runs = [chat.decode([token for token, _ in run]) for masked, run in by_mask if masked]
        assert all(text.endswith("<|im_end|>") for text in runs)
        assert [chat.render([turn], add_generation_prompt=False) for turn in episodes.expert_turns(row)] == [
            f"<|im_start|>assistant\n{text}\n" for text in runs
        ]
        assert len(ids) < 170


def test_a_sampled_turn_leads_where_the_same_message_leads(chat):
    row = next(row for row in ROWS if "files" in row)
    for turn in episodes.expert_turns(row):
        sampled, given = episodes.Play(chat, row), episodes.Play(chat, row)
        prompt = sampled.start()
        given.start()
        text = chat.render([*sampled.messages, turn], episodes.TOOLS, add_generation_prompt=False)
        ids = chat.encode(text.removesuffix("\n"))[len(prompt) :]
        assert ids[-1] in chat.eos_ids
        assert sampled.reply(ids, 16) == given.follow(turn, 16)


def test_the_prompt_is_the_tasks_own(chat):
    task = ArithTask()
    for row in ROWS:
        ids = chat.encode(chat.render(task.prompt(row), task.tools(row)))
        assert episodes.expert_tokens(chat, row)[0][: len(ids)] == ids


def test_the_pretended_shell_says_what_bash_says(tmp_path: Path):
    def real(command: str) -> tuple[str, int]:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stdout, done.returncode

    for row in ROWS:
        (tmp_path / "numbers.txt").unlink(missing_ok=True)
        for content in row.get("files", {}).values():
            (tmp_path / "numbers.txt").write_text(content)
        for turn in episodes.expert_turns(row)[:-1]:
            command = turn.tool_calls[0].arguments["command"]
            assert episodes.shell(command, row.get("files", {})) == real(command)


@pytest.mark.parametrize(
    "command",
    [
        "echo $((012+1))",
        "echo $((2**3))",
        "echo $((1+))",
        "rm -rf /",
        "echo $((1)); ls",
        "cat other",
        "cat numbers.txt",
    ],
)
def test_everything_else_fails_and_runs_nowhere(command):
    assert episodes.shell(command, {})[1] != 0


def test_wrong_calls_are_answered_as_the_agent_answers_them():
    assert episodes.tool_text(ToolCall("", error="malformed"), {}) == "malformed"
    assert "no tool is called 'f'" in episodes.tool_text(ToolCall("f"), {})
    assert "needs command" in episodes.tool_text(ToolCall("bash"), {})
    assert episodes.tool_text(ToolCall("bash", {"command": "ls"}), {}).endswith("[exit code 2]")


def test_a_play_ends_at_its_last_turn(chat):
    play = episodes.Play(chat, ROWS[0])
    play.start()
    call = Message("assistant", tool_calls=(ToolCall("bash", {"command": "ls"}),))
    assert play.follow(call, max_turns=2)
    assert play.follow(call, max_turns=2) is None
    assert not play.solved


def test_training_the_vocabulary_is_repeatable_and_ids_are_unique():
    texts = ["low lower lowest <tool_call>", "new newer newest 1234"] * 5
    first, again = (bpe.train(texts, 300) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    vocab = first["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(len(vocab)))
    assert all("".join(pair) in vocab and set(pair) <= set(vocab) for pair in first["model"]["merges"])
    assert " low"[1:] in vocab and "12" not in vocab
