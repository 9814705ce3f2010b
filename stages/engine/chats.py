"""POST /v1/chat/completions: its answer, and the tool calls read out of it (Hermes JSON, as vLLM's parser does)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from stages.engine.answers import FINGERPRINT, Answer, text_logprobs, token_ids, usage
from stages.engine.errors import RequestError
from stages.engine.sequence import Sequence as Generation
from stages.toolcalls import parse_hermes
from stages.trajectory import ToolCall


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: arguments as objects, parts of text joined, no null content.

    Raises:
        RequestError: none at all, or arguments that are no JSON object.
    """
    if not messages:
        raise RequestError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return [_template_message(message) for message in messages]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(message)
    content = shown.get("content")
    if isinstance(content, list):
        shown["content"] = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    elif content is None:
        shown["content"] = ""
    calls = shown.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError("tool_calls is no list", param="messages")
        shown["tool_calls"] = [_template_call(call) for call in calls]
    return shown


def _template_call(call: Any) -> dict[str, Any]:
    given = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(given, Mapping):
        raise RequestError("a tool call has no function", param="messages")
    function = dict(given)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the arguments of a tool call are not JSON: {error}", param="messages") from error
        if not isinstance(function["arguments"], dict):
            raise RequestError("the arguments of a tool call are no JSON object", param="messages")
    return {**call, "function": function}


def read_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Content and tool calls of an answer's text; a text without a readable call is content as a whole."""
    content, calls = parse_hermes(text)
    if not calls or any(call.error is not None for call in calls):
        return text, []
    return content or None, [_wire_call(call) for call in calls]


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-tool-{uuid4().hex[:16]}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }


def finish_reason(sequence: Generation, calls: Sequence[object]) -> str | None:
    """A turn that ends with calls says so."""
    return "tool_calls" if calls and sequence.finish_reason == "stop" else sequence.finish_reason


def chat_answer(sequences: list[Generation], about: Answer) -> dict[str, Any]:
    """The whole answer."""
    return {
        "id": about.request_id,
        "object": "chat.completion",
        "created": about.created,
        "model": about.model,
        "choices": [_choice(index, one, about) for index, one in enumerate(sequences)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(sequences, about.copies, created_cache=0),
        "prompt_logprobs": about.prompt_scores,
        "prompt_token_ids": sequences[0].prompt if about.with_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(index: int, sequence: Generation, about: Answer) -> dict[str, Any]:
    text: str | None = about.decoder.answer(sequence)
    calls: list[dict[str, Any]] = []
    if about.parse_tools and text:
        text, calls = read_calls(text)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if calls:
        message["tool_calls"] = calls
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = text_logprobs(sequence.drawn, about.decoder, about.top_logprobs, as_ids=about.as_ids)
    return {
        "index": index,
        "message": {**message, "reasoning": None},
        "logprobs": logprobs,
        "finish_reason": finish_reason(sequence, calls),
        "stop_reason": sequence.stop_reason,
        "token_ids": token_ids(sequence) if about.with_ids else None,
        "routed_experts": None,
    }
