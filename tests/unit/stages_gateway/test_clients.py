"""The makers' own clients against the gateway: chat, responses, messages, completions; streamed or not; with tools."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from stages.errors import LLMError
from tests.support.gateways import Gateway, call, exact, gateway

Calls = list[tuple[str, str, Any]]
Ask = Callable[[Gateway, list[dict[str, Any]], bool], Awaitable[tuple[str, Calls, dict[str, Any], Any]]]
"""Asks with a conversation in the dialect's own shape; content, calls (id, name, arguments), usage, what to say."""
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
COMMAND = {"command": "echo 19"}


def openai_client(held: Gateway, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{held.url}/v1", api_key=held.session.token, max_retries=0, **more)


def anthropic_client(held: Gateway, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=held.url, api_key=held.session.token, max_retries=0, **more)


async def ask_chat(held: Gateway, messages: list[Any], stream: bool) -> Any:
    tools: Any = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
    async with openai_client(held) as client:
        if not stream:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            message, usage = answer.choices[0].message, answer.usage
            assert answer.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
        else:
            async with client.chat.completions.stream(
                model="m", messages=messages, tools=tools, stream_options={"include_usage": True}
            ) as events:
                answer = await events.get_final_completion()
            message, usage = answer.choices[0].message, answer.usage
    calls = [(one.id, one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or []]
    used = {"in": usage.prompt_tokens, "out": usage.completion_tokens}
    said: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": c[0], "type": "function", "function": {"name": c[1], "arguments": json.dumps(c[2], indent=1)}}
            for c in calls
        ]
    return message.content or "", calls, used, [said]


def chat_result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": text}]}


async def ask_responses(held: Gateway, messages: list[Any], stream: bool) -> Any:
    tools: Any = [{"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}]
    async with openai_client(held) as client:
        if stream:
            async with client.responses.stream(model="m", input=messages, tools=tools) as events:
                kinds = [event.type async for event in events]
                answer = await events.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        else:
            answer = await client.responses.create(model="m", input=messages, tools=tools)
    calls = [(one.call_id, one.name, json.loads(one.arguments)) for one in answer.output if one.type == "function_call"]
    used = {"in": answer.usage.input_tokens, "out": answer.usage.output_tokens}
    return answer.output_text, calls, used, [item.to_dict() for item in answer.output]


def responses_result(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


async def ask_messages(held: Gateway, messages: list[Any], stream: bool) -> Any:
    tools: Any = [{"name": "bash", "input_schema": PARAMETERS}]
    async with anthropic_client(held) as client:
        if stream:
            async with client.messages.stream(model="m", max_tokens=300, messages=messages, tools=tools) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(model="m", max_tokens=300, messages=messages, tools=tools)
    text = "".join(block.text for block in answer.content if block.type == "text")
    calls = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")
    used = {"in": answer.usage.input_tokens + answer.usage.cache_read_input_tokens, "out": answer.usage.output_tokens}
    return text, calls, used, [{"role": "assistant", "content": [block.to_dict() for block in answer.content]}]


def messages_result(call_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": text}]}]
    return {"role": "user", "content": content}


DIALECTS: Any = pytest.mark.parametrize(
    ("ask", "result"),
    [(ask_chat, chat_result), (ask_responses, responses_result), (ask_messages, messages_result)],
    ids=["chat", "responses", "messages"],
)


@DIALECTS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_with_tools_is_one_exact_chain(ask: Ask, result: Any, stream: bool) -> None:
    says = [f"I look.\n{call('bash', json.dumps(COMMAND))}", "The answer is 19.", "You are welcome."]
    async with gateway(says) as held:
        messages: list[Any] = [{"role": "user", "content": "12 + 7 = ?"}]
        text, calls, usage, said = await ask(held, messages, stream)
        assert text == "I look." and [one[1:] for one in calls] == [("bash", COMMAND)]
        first = held.chains[0]
        assert usage == {"in": first.prompt_length, "out": first.turns[0].end - first.turns[0].start}
        messages += [*said, result(calls[0][0], "19")]
        text, calls, usage, said = await ask(held, messages, stream)
        assert (text, calls) == ("The answer is 19.", [])
        messages += [*said, {"role": "user", "content": "Thanks."}]
        assert (await ask(held, messages, stream))[0] == "You are welcome."
        (chain,) = held.chains
        assert len(chain.turns) == 3 and [v.version for v in chain.policy_versions] == [3, 3, 3]
        exact(held)
        whole = held.chat.decode(chain.token_ids)
        assert whole.count("I look.") == whole.count("<tool_response>\n19\n</tool_response>") == 1


@DIALECTS
async def test_errors_are_those_of_the_api(ask: Ask, result: Any) -> None:
    del result
    maker: Any = anthropic if ask is ask_messages else openai
    async with gateway(["x"], context=8) as held:
        with pytest.raises(maker.BadRequestError) as caught:
            await ask(held, [{"role": "user", "content": "a long question " * 40}], False)
        error = caught.value.body if maker is openai else caught.value.body["error"]
        if maker is openai:
            assert error["code"] == "context_length_exceeded" and "maximum context length" in error["message"]
        else:
            assert error["type"] == "invalid_request_error" and "prompt is too long" in error["message"]
        assert held.session.full is not None and held.session.turns == 0 and held.chains == []
    async with gateway([LLMError("the engine is gone")]) as held:
        with pytest.raises(maker.InternalServerError):
            await ask(held, [{"role": "user", "content": "hello"}], True)
        assert isinstance(held.session.failure, LLMError) and held.session.ended.is_set()
    async with gateway(["one"], max_turns=1) as held:
        await ask(held, [{"role": "user", "content": "hello"}], False)
        with pytest.raises(maker.PermissionDeniedError, match="all 1 turns are spent"):
            await ask(held, [{"role": "user", "content": "again"}], False)
        held.session.token += "x"
        with pytest.raises(maker.AuthenticationError):
            await ask(held, [{"role": "user", "content": "hello"}], False)


async def test_completions_go_on_from_their_own_text_and_ids() -> None:
    async with gateway(["four", [5, 6, 7], [8, 9]]) as held, openai_client(held) as client:
        first = await client.completions.create(model="m", prompt="Two and two is ", max_tokens=50)
        assert first.choices[0].text == "four" and first.usage is not None
        more = f"Two and two is four{'<|im_end|>'} and on"
        stream = await client.completions.create(model="m", prompt=more, max_tokens=50, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
        assert text == held.chat.decode([5, 6, 7])
        ids = [*held.chains[0].token_ids, 11, 12]
        await client.completions.create(model="m", prompt=ids, max_tokens=50)
        (chain,) = held.chains
        assert chain.token_ids == [*ids, 8, 9] and len(chain.turns) == 3
        exact(held)
        with pytest.raises(openai.BadRequestError, match="best_of"):
            await client.completions.create(model="m", prompt="x", best_of=3)


async def test_a_response_goes_on_from_another_by_its_id() -> None:
    async with gateway(["Ann.", "You said Ann."]) as held, openai_client(held) as client:
        first = await client.responses.create(model="m", instructions="Be brief.", input="My name is Ann.")
        second = await client.responses.create(
            model="m", instructions="Be brief.", input="Who am I?", previous_response_id=first.id
        )
        assert second.output_text == "You said Ann." and len(held.chains) == 1
        exact(held)
        with pytest.raises(openai.BadRequestError, match="previous response"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_nobody")


async def test_stop_texts_end_the_answer_where_an_engine_would_end_it() -> None:
    async with gateway(["Thought: add.\nObservation: 5\nmore", "next"]) as held, anthropic_client(held) as client:
        answer = await client.messages.create(
            model="m", max_tokens=300, stop_sequences=["\nObservation:"], messages=[{"role": "user", "content": "2+3"}]
        )
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\nObservation:")
        assert answer.content[0].type == "text" and answer.content[0].text == "Thought: add."
        sampled = held.chains[0].token_ids[held.chains[0].turns[0].start :]
        assert "Observation:" in held.chat.decode(sampled) and "more" not in held.chat.decode(sampled)
        assert answer.usage.output_tokens == len(sampled) == len(held.chains[0].logprobs) - held.chains[0].prompt_length


async def test_tokens_of_a_prompt_are_counted_without_a_turn() -> None:
    async with gateway([]) as held, anthropic_client(held) as client:
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hello there"}])
        assert counted.input_tokens > 3 and held.session.turns == 0 and held.chains == []


async def test_what_the_gateway_does_not_do_is_refused_by_name() -> None:
    async with gateway([]) as held, openai_client(held) as client:
        hello: Any = [{"role": "user", "content": "hello"}]
        for field, value in (("n", 2), ("logprobs", True), ("tool_choice", "required")):
            with pytest.raises(openai.BadRequestError, match=field):
                await client.chat.completions.create(model="m", messages=hello, **{field: value})
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content.*image_url"):
            await client.chat.completions.create(model="m", messages=image)
        with pytest.raises(openai.BadRequestError, match="Expected `array`"):
            await client.chat.completions.create(model="m", messages="hello")  # type: ignore[call-overload]
        with pytest.raises(openai.NotFoundError, match="there is no /v1/models here"):
            await client.models.list()
        assert held.engine.prompts == []
