"""The shipped policies: complete, small, untied, and as good as their logs have to say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from stages.chat import ChatTokenizer
from workflows.policies import __file__ as policies_file
from workflows.tasks import sums
from workflows.tasks.arith import ArithTask

POLICIES = Path(policies_file).parent
RANGES = {"tiny": (0.95, 1.0), "tiny-half": (0.10, 0.40)}
both = pytest.mark.parametrize("name", RANGES)


@both
def test_each_is_below_six_megabytes(name):
    sizes = {path.name: path.stat().st_size for path in (POLICIES / name).iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"} <= set(sizes)
    assert sum(sizes.values()) < 6e6, sizes


@both
def test_the_log_holds_the_success_that_was_promised(name):
    log = json.loads((POLICIES / name / "train_log.json").read_text())
    report = log["heldout"]
    low, high = RANGES[name]
    assert report["episodes"] >= 1000
    assert low <= report["success"] <= high
    assert report["low"] < report["success"] < report["high"]
    assert log["steps"] == log["history"][-1]["step"]
    assert {"step", "loss", "elapsed_s"} <= set(log["history"][0])


def test_the_half_trained_one_has_something_to_learn_from_both_kinds():
    report = json.loads((POLICIES / "tiny-half" / "train_log.json").read_text())["heldout"]
    assert report["mixed_groups"] > 0.3
    assert 0.03 < report["file"] < 0.9 and 0.03 < report["plain"] < 0.9


@both
def test_weights_are_float32_untied_and_in_hugging_face_names(name):
    with (POLICIES / name / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__")
    config = json.loads((POLICIES / name / "config.json").read_text())
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    table = [config["vocab_size"], config["hidden_size"]]
    assert header["model.embed_tokens.weight"]["shape"] == header["lm_head.weight"]["shape"] == table
    assert config["tie_word_embeddings"] is False
    assert header["model.layers.0.self_attn.q_norm.weight"]["shape"] == [config["head_dim"]]
    end = max(entry["data_offsets"][1] for entry in header.values())
    assert (POLICIES / name / "model.safetensors").stat().st_size == 8 + size + end


@both
def test_the_tokenizer_gives_the_tasks_texts_back(name):
    chat = ChatTokenizer.load(POLICIES / name)
    config = json.loads((POLICIES / name / "config.json").read_text())
    assert chat.vocab_size == config["vocab_size"]
    assert chat.eos_ids == {config["eos_token_id"]}
    task = ArithTask(limit=50)
    for row in task.rows():
        text = chat.render(task.prompt(row), task.tools(row)) + sums.answer_text(row["answer"])
        assert chat.decode(chat.encode(text)) == text
        assert len(chat.encode(chat.render(task.prompt(row), task.tools(row)))) < 100


def test_both_share_one_tokenizer_and_template():
    first, second = (ChatTokenizer.load(POLICIES / name) for name in RANGES)
    assert (first.digest, first.template_digest) == (second.digest, second.template_digest)
    assert (POLICIES / "tiny" / "chat_template.jinja").read_text() == (POLICIES / "chat_template.jinja").read_text()
