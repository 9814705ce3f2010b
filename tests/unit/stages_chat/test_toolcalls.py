"""Hermes tool calls: what is read, what is refused, and that nothing sampled is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.chat import parse_tool_calls
from stages.trajectory import ToolCall

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAME = st.text(min_size=1, max_size=20)
PLAIN = st.text().filter(lambda text: "<tool_call>" not in text)


def written(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_text_without_calls_is_untouched():
    assert parse_tool_calls("  The answer is 15.\n") == ("  The answer is 15.\n", ())


@given(st.lists(st.tuples(NAME, st.dictionaries(st.text(), JSON, max_size=3)), min_size=1, max_size=4), PLAIN)
def test_what_was_written_is_read(calls, before):
    text = before + "".join(written(name, arguments) for name, arguments in calls)
    content, read = parse_tool_calls(text)
    assert content == before.strip()
    assert [(call.name, call.arguments, call.error) for call in read] == [(*call, None) for call in calls]
    assert [call.id for call in read] == [f"call_{number}" for number in range(len(calls))]


@given(st.text(alphabet=st.sampled_from(list('<>/tool_callname"arguments{}[]:, \\\n1é'))) | st.text())
def test_any_text_is_read_without_an_exception(text):
    content, calls = parse_tool_calls("<tool_call>" + text)
    assert calls
    for call in calls:
        assert call.error or (call.name and "</tool_call>" in text)
    if all(call.error for call in calls):
        assert content == ("<tool_call>" + text).strip()


@pytest.mark.parametrize("command", ["grep '<tool_call>' x", "grep '</tool_call>' x", "<tool_call>{}</tool_call>"])
def test_tags_inside_a_string_end_nothing(command):
    text = "a" + written("bash", {"command": command}) + "b" + written("f", {})
    content, calls = parse_tool_calls(text)
    assert [(call.name, call.arguments) for call in calls] == [("bash", {"command": command}), ("f", {})]
    assert content == "ab"


@pytest.mark.parametrize(
    "text", ['{"name": "f", "arguments": {"a": "\\ud800"}}', '{"name": "f", "arguments": {"a": NaN}}']
)
def test_what_no_strict_json_holds_is_refused(text):
    _, (call,) = parse_tool_calls(f"<tool_call>{text}</tool_call>")
    assert "not JSON" in (call.error or "")


def test_deep_nesting_is_refused_and_breaks_nothing():
    _, (call,) = parse_tool_calls('<tool_call>{"name": "f", "arguments": ' + "[" * 100_000 + "</tool_call>")
    assert call.error


def test_arguments_may_be_a_string_of_json_or_absent():
    assert parse_tool_calls(written("f", '{"a": 1}'))[1] == (ToolCall("f", {"a": 1}, "call_0"),)
    assert parse_tool_calls('<tool_call>{"name": "f"}</tool_call>')[1] == (ToolCall("f", {}, "call_0"),)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("<tool_call>{bad}</tool_call>", "", "not JSON"),
        ("<tool_call></tool_call>", "", "not JSON"),
        ("<tool_call>[1]</tool_call>", "", "not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "", '"name" must be'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", '"name" must be'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "must be a JSON object"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "f", "holds no JSON"),
        ('<tool_call>{"name": "f", "arguments": {}}', "", "no </tool_call>"),
    ],
)
def test_malformed_calls_say_why_and_keep_their_text(text, name, said):
    content, (call,) = parse_tool_calls(text)
    assert call.name == name and said in (call.error or "")
    assert content == text


def test_a_good_call_beside_a_bad_one():
    content, calls = parse_tool_calls("a " + written("f", {}) + "<tool_call>{</tool_call>" + written("g", {}) + " b")
    assert [call.name for call in calls] == ["f", "", "g"]
    assert content == "a <tool_call>{</tool_call> b"


def test_a_call_left_open_before_another_does_not_swallow_it():
    _, calls = parse_tool_calls('<tool_call>{"name": "f", ' + written("g", {"a": 1}))
    assert [call.name for call in calls] == ["", "g"]


def test_the_error_quotes_no_more_than_a_line():
    _, (call,) = parse_tool_calls("<tool_call>" + "x" * 10_000 + "</tool_call>")
    assert len(call.error or "") < 250
