"""A small tokenizer, trained in a moment, and templates that behave as the families that we serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.chat import ChatTokenizer
from workflows.policies import __file__ as policies_file
from workflows.policies import bpe

SHIPPED = (Path(policies_file).parent / "chat_template.jinja").read_text(encoding="utf-8")

GROUPING = """{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Qwen's way with tool results: those of one turn stand in one user message."""

FORGETTING = """{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops the reasoning of every turn but the last, as several families do."""


@pytest.fixture(scope="session")
def tokenizer_json() -> dict:
    return bpe.train(
        ["The answer is 15.\n", "echo $((12+7-4))", '{"name": "bash", "arguments": {"command": "x"}}'], 320
    )


@pytest.fixture
def make(tmp_path: Path, tokenizer_json: dict) -> Callable[[str], ChatTokenizer]:
    """Writes a model directory with a template and loads it."""

    def load(template: str) -> ChatTokenizer:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        (tmp_path / "chat_template.jinja").write_text(template)
        return ChatTokenizer.load(tmp_path)

    return load


@pytest.fixture
def chat(make: Callable[[str], ChatTokenizer]) -> ChatTokenizer:
    return make(SHIPPED)
