"""Tokenizer and templates: the stream that bridges build is the rendering of the whole conversation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from stages import chat as chats
from stages.chat import ChatError, ChatTokenizer
from stages.trajectory import Message, ToolCall
from tests.unit.stages_chat.conftest import FORGETTING, GROUPING, SHIPPED
from workflows.tools import bash

TOOLS = [bash.SCHEMA]
FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
TEXT = st.text(max_size=30).filter(lambda text: "<" not in text)
CALL = st.builds(ToolCall, st.just("bash"), st.fixed_dictionaries({"command": TEXT}), st.just("call_0"))
ASSISTANT = st.builds(Message, st.just("assistant"), TEXT, st.lists(CALL, min_size=1, max_size=2).map(tuple))
TURN = st.tuples(ASSISTANT, st.lists(st.builds(Message, st.just("tool"), TEXT), min_size=1, max_size=3))


def stream(chat: ChatTokenizer, prompt: list[Message], turns, last: Message, ended: bool) -> str:
    """The text of a rollout: prompt, then what each assistant message adds, then the bridge."""
    messages = list(prompt)
    text = chat.render(messages, TOOLS)
    for assistant, results in turns:
        text += said(chat, messages, assistant) + ("<|im_end|>" if ended else "")
        messages.append(assistant)
        bridge = chat.bridge(messages, results, TOOLS, ended)
        assert bridge is not None
        text += bridge
        messages += results
    return text + said(chat, messages, last)


def said(chat: ChatTokenizer, before: list[Message], assistant: Message) -> str:
    whole = chat.render([*before, assistant], TOOLS, add_generation_prompt=False)
    return whole[len(chat.render(before, TOOLS)) :].removesuffix(chat.turn_tail)


@pytest.mark.parametrize("template", [SHIPPED, GROUPING])
@FIXTURES
@given(turns=st.lists(TURN, max_size=3), ended=st.booleans(), system=TEXT, question=TEXT)
def test_the_stream_is_the_whole_rendering(make, template, turns, ended, system, question):
    chat = make(template)
    prompt = [Message("system", system), Message("user", question)]
    last = Message("assistant", "The answer is 15.")
    whole = [*prompt, *(message for turn, results in turns for message in (turn, *results)), last]
    text = stream(chat, prompt, turns, last, ended)
    assert text + chat.turn_tail == chat.render(whole, TOOLS, add_generation_prompt=False)


@FIXTURES
@given(text=st.text())
def test_any_text_survives_encoding(chat, text):
    assert chat.decode(chat.encode(text)) == text


def test_the_end_of_turn_is_said_once(chat):
    previous = [Message("user", "hi"), Message("assistant", "yes")]
    ended = chat.bridge(previous, [Message("user", "more")], None, ended=True)
    cut = chat.bridge(previous, [Message("user", "more")], None, ended=False)
    assert chat.turn_tail == "<|im_end|>\n"
    assert cut == "<|im_end|>" + ended
    assert ended == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_the_bridge_never_renders_the_sampled_text(chat):
    # A model may space its JSON as no template would: what it sampled stays, and the bridge is the same.
    new = [Message("tool", "15")]
    usual = [Message("user", "q"), Message("assistant", "", (ToolCall("bash", {"command": "x"}),))]
    plain = [Message("user", "q"), Message("assistant", '<tool_call>{"name":"bash"}</tool_call>')]
    assert chat.bridge(usual, new, TOOLS, True) == chat.bridge(plain, new, TOOLS, True)


def test_a_template_that_forgets_has_no_bridge(make):
    chat = make(FORGETTING)
    thought = [Message("user", "q"), Message("assistant", "<think>hm</think>yes")]
    assert chat.bridge(thought, [Message("user", "more")], None, True) is None
    plain = [Message("user", "q"), Message("assistant", "yes")]
    assert chat.bridge(plain, [Message("user", "more")], None, True) is not None


def test_special_tokens_are_one_token_and_kept(chat):
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>"):
        (index,) = chat.encode(token)
        assert chat.token(index) == token == chat.decode([index])
    assert [chat.token(index) for index in chat.eos_ids] == ["<|im_end|>"]
    assert len(chat.encode("4715")) == 4
    with pytest.raises(ChatError, match="999999"):
        chat.token(999_999)


def test_malformed_calls_are_shown_by_their_text_alone(chat):
    text = "<tool_call>{</tool_call>"
    broken = Message("assistant", text, (ToolCall("", {}, "call_0", "malformed"),))
    assert chat.render([Message("user", "q"), broken]) == chat.render(
        [Message("user", "q"), Message("assistant", text)]
    )


def test_messages_may_be_dicts(chat):
    call = {"type": "function", "id": "", "function": {"name": "bash", "arguments": {"command": "é <b>"}}}
    values = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    records = [
        Message("user", "q"), Message("assistant", "", (ToolCall("bash", {"command": "é <b>"}),)),
    ]  # fmt: skip
    assert chat.render(values) == chat.render(records)
    assert '{"command": "é <b>"}' in chat.render(values)


def test_digests_name_content(make, tmp_path: Path):
    first, second = make(SHIPPED), make(GROUPING)
    assert first.digest == second.digest and len(first.digest) == 64
    assert first.template_digest != second.template_digest
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + "\n")
    assert ChatTokenizer.load(tmp_path).digest != first.digest


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}body{% endgeneration %}", "body"),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "a"),
        ("{{ eos_token }}", "<|im_end|>"),
        ("{% if true %}\n  x\n{% endif %}\n", "  x\n"),
        ("{{ {'b': '<é>', 'a': 1} | tojson(separators=(',', ':')) }}", '{"b":"<é>","a":1}'),
        ("{{ 'no tools' if not tools else 'tools' }}", "no tools"),
    ],
)
def test_templates_find_what_transformers_gives_them(make, template, shown):
    assert make(template).render([Message("user", "a"), Message("user", "b")], tools=()) == shown


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages.append(1) }}", "{{ missing.field }}"]
)
def test_a_refusal_is_a_chat_error(make, template):
    chat = make(template)
    with pytest.raises(ChatError, match="refused 1 messages"):
        chat.render([Message("user", "a")])


def test_directories_that_cannot_serve_are_refused_by_name(make, tmp_path: Path):
    make(SHIPPED)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ChatError, match="end-of-sequence"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ChatError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ChatError, match="no valid Jinja"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ChatError, match="no chat template"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ChatError, match="not a tokenizer file"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ChatError, match=r"tokenizer\.json: cannot be read"):
        ChatTokenizer.load(tmp_path)


def test_templates_and_ends_are_found_where_families_put_them(make, tmp_path: Path):
    make(SHIPPED)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    settings_ = {"chat_template": named, "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0]}')
    chat = ChatTokenizer.load(tmp_path)
    assert chat.render([]) == "yes"
    assert {chat.token(index) for index in chat.eos_ids} == {"<|endoftext|>", "<|im_end|>"}


def test_it_imports_fast():
    code = "import time; t = time.process_time(); import stages.chat; print(time.process_time() - t)"
    took = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]
    assert min(took) < 1.0, took


TRICKS = """{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.items }}{{ m.missing }}{{ m.content.upper() }}
{%- for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}
{%- set ns = namespace(seen=1) %}{% set ns.seen = 2 %}{{ ns.seen }}{{ tools | tojson }}"""


def test_the_sandbox_answers_as_jinjas_own_does_twice_over():
    own, theirs = chats._environment(), ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    theirs.filters["tojson"] = own.filters["tojson"]
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": 1.0, "c": True, "d": None, "é": "ü"}}}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": calls}]
    templates = [environment.from_string(TRICKS) for environment in (own, theirs)]
    for _ in range(2):
        one, other = (template.render(messages=messages, tools=TOOLS) for template in templates)
        assert re.sub("0x[0-9a-f]+", "", one) == re.sub("0x[0-9a-f]+", "", other)
    for hostile in ("{{ x.__class__ }}", "{{ m.append(1) }}", "{{ m.__class__.__mro__ }}", "{{ d.update(a=1) }}"):
        for _ in range(2):
            assert shown(own, hostile) == shown(theirs, hostile) in {"", "SecurityError"}


def shown(environment: ImmutableSandboxedEnvironment, template: str) -> str:
    try:
        return environment.from_string(template).render(x="", m=[], d={})
    except SecurityError as error:
        return type(error).__name__


def test_values_that_look_alike_keep_their_own_json():
    values = [1, 1.0, True, "1", None, float("nan"), [1], {"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}]
    for _ in range(2):
        assert [chats._tojson(value) for value in values] == [json.dumps(value) for value in values]
    assert chats._tojson({"a": float("nan")}) == '{"a": NaN}' and chats._tojson({1: 2}) == '{"1": 2}'
    with pytest.raises(TypeError):
        chats._tojson({"a": object()})


def test_a_prompt_that_comes_again_is_encoded_once(chat):
    ids = chat.encode_prompt("What is 2 + 2?")
    assert ids == chat.encode("What is 2 + 2?") and chat.encode_prompt("What is 2 + 2?") is ids
