"""XML and Python-style tool calls: what reads, what is told to the model, and whose format a template teaches."""

from __future__ import annotations

import msgspec
import pytest

from stages.toolformats import ToolFormat, format_of, parse_calls

XML = "<tool_call>\n<function=bash>\n<parameter=command>\n{}\n</parameter>\n</function>\n</tool_call>"


def test_an_xml_call_keeps_its_text_and_the_thinking_before_it() -> None:
    command = "echo '</parameter>' > a\n  <b>\n"
    content, (call,) = parse_calls("<think>so</think>\n" + XML.format(command), "xml")
    assert (content, call.name, call.arguments) == ("<think>so</think>", "bash", {"command": command})
    assert call.error is None


def test_xml_values_that_are_json_of_another_kind_are_taken_for_that() -> None:
    text = '<tool_call><function=f><parameter=n>3</parameter><parameter=o>{"a": [1]}</parameter>'
    text += '<parameter=s>"3"</parameter></function></tool_call>'
    _, (call,) = parse_calls(text, "xml")
    assert call.arguments == {"n": 3, "o": {"a": [1]}, "s": '"3"'}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call><function=f>", "no </tool_call>"),
        ("<tool_call>f()</tool_call>", "not one <function=NAME>"),
        ("<tool_call><function=f>x</function></tool_call>", "other text"),
        (XML.format("a").replace("</function>", "<parameter=command>b</parameter></function>"), "twice"),
    ],
)
def test_xml_that_cannot_be_read_is_said_and_stays_in_the_content(text: str, reason: str) -> None:
    content, (call,) = parse_calls(text, "xml")
    assert content == text and call.error is not None and reason in call.error


def test_python_calls_are_a_list_of_literals() -> None:
    text = '<think>a</think>[bash(command="ls\\n", n=-1), other.f(x={"a": [True, None]})]'
    content, calls = parse_calls(text, "python")
    assert content == "<think>a</think>"
    assert [(call.name, call.arguments) for call in calls] == [
        ("bash", {"command": "ls\n", "n": -1}), ("other.f", {"x": {"a": [True, None]}}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[bash('ls')]", "arguments need names"),
        ("[bash(command=open('x'))]", "no literal"),
        ("[bash(command=1), 2]", "something else than calls"),
        ("[bash(command=", "no Python list"),
        ("[f(a=b'x' + 1)]", "no literal"),
    ],
)  # fmt: skip
def test_python_that_cannot_be_read_is_said_and_nothing_is_run(text: str, reason: str) -> None:
    content, calls = parse_calls(text, "python")
    assert content == text
    assert any(call.error is not None and reason in call.error for call in calls)


@pytest.mark.parametrize("form", ["hermes", "xml", "python"])
def test_a_text_without_calls_is_content(form: str) -> None:
    text = "The list is [1, 2] and f(x) is <b>."
    assert parse_calls(text, form) == (text, ())  # type: ignore[arg-type]


def test_a_template_tells_its_format() -> None:
    assert format_of("... <function=example_function_name> ...") == "xml"
    assert format_of("[func_name1(params_name1=params_value1)]") == "python"
    assert format_of('<tool_call>\n{"name": ') == "hermes"


BIG = str(10**23)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"n": [{BIG}]}}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": "{{\\"n\\": {BIG}}}"}}</tool_call>'),
        ("xml", f"<tool_call><function=f><parameter=n>{BIG}</parameter></function></tool_call>"),
        ("python", f"[f(n={BIG})]"),
        ("python", f"[f(n=-{BIG})]"),
        ("python", "[f(n=1e999)]"),
        ("python", "[f(n={1: 2})]"),
        ("python", "[f(n=b'x')]"),
        ("python", "[f(n={1, 2})]"),
        ("python", "[f(n=1, n=2)]"),
        ("python", "[f(n='\\ud800')]"),
    ],
)
def test_arguments_that_no_row_could_keep_are_malformed(form: ToolFormat, text: str) -> None:
    content, (call,) = parse_calls(text, form)
    assert call.error is not None and call.arguments == {} and content == text
    msgspec.msgpack.encode(call)


def test_integers_of_64_bits_are_kept() -> None:
    for number in (2**64 - 1, -(2**63)):
        text = f'<tool_call>{{"name": "f", "arguments": {{"n": {number}}}}}</tool_call>'
        assert parse_calls(text, "hermes")[1][0].arguments == {"n": number}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>' * 70),
        ("hermes", "<tool_call>x" * 70 + "</tool_call>"),
        ("xml", "<tool_call><function=f></function></tool_call>" * 70),
        ("python", f"[{'f(), ' * 70}]"),
    ],
)
def test_what_is_beyond_64_calls_is_one_malformed_call(form: ToolFormat, text: str) -> None:
    content, calls = parse_calls(text, form)
    assert len(calls) == 65 and "64 calls" in str(calls[-1].error)
    assert content.endswith(text[-12:])


def test_tags_that_never_close_are_one_malformed_call() -> None:
    text = "<tool_call>" + '<tool_call>{"a": "' * 20_000 + " " * 1000
    content, (call,) = parse_calls(text, "hermes")
    assert "no </tool_call>" in str(call.error) and content == text.strip()
