"""Messages for the chat template: calls of another shape are the request's fault."""

from __future__ import annotations

from typing import Any

import pytest

from stages.engine.chats import template_messages
from stages.engine.errors import RequestError


@pytest.mark.parametrize(
    "calls",
    [
        "f", {"a": 1}, [3], ["f"], [{}], [{"function": None}], [{"function": "f"}], [{"function": ["f"]}],
        [{"function": {"name": "f", "arguments": "[1]"}}], [{"function": {"name": "f", "arguments": "nonsense"}}],
        [{"function": {"name": "f", "arguments": "[" * 100_000}}],
    ],
)  # fmt: skip
def test_tool_calls_of_another_shape_are_refused(calls: Any) -> None:
    with pytest.raises(RequestError, match="call"):
        template_messages([{"role": "assistant", "tool_calls": calls}])


def test_arguments_become_an_object() -> None:
    (message,) = template_messages([{"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
