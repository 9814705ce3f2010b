"""A request that is read as going on from an earlier one is read as it would be alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.gateway.asks import Ask, Dialect
from stages.gateway.errors import RefusedError
from stages.gateway.histories import Heard, heard
from stages.gateway.session import ROUTES

CHAT, RESPONSES, MESSAGES = (ROUTES[f"/v1/{name}"] for name in ("chat/completions", "responses", "messages"))
TEXTS = st.text(alphabet='ab"\\[]{},:é\n ', max_size=6)


def chat(texts: list[str]) -> list[Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    forms: list[Any] = [
        {"role": "user"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1"},
    ]  # fmt: skip
    return [{**forms[n % 3], "content": text} for n, text in enumerate(texts)]


def messages(texts: list[str]) -> list[Any]:
    forms = (
        lambda text: {"role": "user", "content": text},
        lambda text: {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": text, "input": {}}]},
        lambda text: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": text}]},
    )
    return [forms[n % 3](text) for n, text in enumerate(texts)]


def items(texts: list[str]) -> list[Any]:
    forms = (
        lambda text: {"role": "user", "content": text},
        lambda text: {"role": "assistant", "content": [{"type": "output_text", "text": text}]},
        lambda text: {"type": "function_call", "call_id": "1", "name": text, "arguments": "{}"},
        lambda text: {"type": "function_call_output", "call_id": "1", "output": text},
        lambda text: {"type": "reasoning", "summary": []},
    )
    return [forms[n % 5](text) for n, text in enumerate(texts)]


def outcome(dialect: Dialect, body: bytes) -> Ask | str:
    try:
        return dialect.read(body)
    except RefusedError as refused:
        return str(refused)


def outcome_after(dialect: Dialect, body: bytes, earlier: list[Heard]) -> Ask | str:
    try:
        return heard(dialect, body, earlier).ask
    except RefusedError as refused:
        return str(refused)


@pytest.mark.parametrize(
    ("dialect", "said", "field"),
    [(CHAT, chat, "messages"), (RESPONSES, items, "input"), (MESSAGES, messages, "messages")],
    ids=["chat", "responses", "messages"],
)
@given(data=st.data())
def test_whatever_came_before_a_request_is_read_as_it_is(dialect: Dialect, said: Any, field: str, data: Any) -> None:
    texts = data.draw(st.lists(TEXTS, min_size=1, max_size=9))
    before, after = ({**data.draw(st.sampled_from(EXTRA))} for _ in range(2))
    form: Any = {"separators": data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))}
    earlier: list[Heard] = []
    for length in data.draw(st.lists(st.integers(0, len(texts)), min_size=1, max_size=4)):
        body = json.dumps({**before, "max_tokens": 9, field: said(texts)[:length], **after}, **form).encode()
        spoilt = body.replace(b"]", data.draw(st.sampled_from([b"]", b",]", b"] ", b""])), 1)
        assert outcome_after(dialect, spoilt, earlier) == outcome(dialect, spoilt)
        if isinstance(outcome(dialect, body), Ask):
            earlier.insert(0, heard(dialect, body, earlier))
            assert earlier[0].ask == dialect.read(body) and earlier[0].body == body


EXTRA: list[dict[str, Any]] = [
    {}, {"instructions": "brief", "system": "brief"}, {"input": [], "messages": []}, {"model": "m"},
    {"metadata": {"x": [{"role": "user", "content": "a"}]}}, {"stream": True, "temperature": 1},
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "said", "field"), [(CHAT, chat, "messages"), (MESSAGES, messages, "messages")])
def test_of_a_longer_history_the_new_messages_alone_are_read(dialect: Dialect, said: Any, field: str) -> None:
    def body(*texts: str) -> bytes:
        return json.dumps({"system": "s", "max_tokens": 9, field: said(list(texts)), "model": "m"}).encode()

    first = heard(dialect, body("one", "two", "three"))
    longer = heard(dialect, body("one", "two", "three", "four", "five", "six"), [first])
    own = longer.ask.instructions
    assert len(longer.ask.messages) == own + 6
    assert all(a is b for a, b in zip(first.ask.messages[own:], longer.ask.messages[own:], strict=False))
    other = heard(dialect, body("one", "TWO", "three", "four"), [longer, first])
    assert other.ask.messages[own] is not longer.ask.messages[own]
