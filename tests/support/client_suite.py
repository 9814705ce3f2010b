"""The makers' own clients against a gateway, and one suite of them for a gateway in front of a real engine.

A subclass of ClientSuite in a test module names the fixture `engine`, as for EngineSuite.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from stages.engine_control import EngineControl
from stages.trajectory import Sampling
from tests.support.engine_suite import Engine
from tests.support.gateways import Held, LiveGateway, exact, live_gateway
from workflows.tools.bash import SCHEMA

Calls = list[tuple[str, str, Any]]
Ask = Callable[[Held, list[dict[str, Any]], bool], Awaitable[tuple[str, Calls, dict[str, Any], Any]]]
"""Asks with a conversation in the dialect's own shape; content, calls (id, name, arguments), usage, what to say."""
FUNCTION: dict[str, Any] = SCHEMA["function"]
PARAMETERS: dict[str, Any] = FUNCTION["parameters"]
TOLD: dict[str, Any] = {"name": "bash", "description": FUNCTION["description"]}
COMMAND = {"command": "echo 19"}


def openai_client(held: Held, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{held.url}/v1", api_key=held.session.token, max_retries=0, **more)


def anthropic_client(held: Held, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=held.url, api_key=held.session.token, max_retries=0, **more)


async def ask_chat(held: Held, messages: list[Any], stream: bool) -> Any:
    tools: Any = [{"type": "function", "function": FUNCTION}]
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


async def ask_responses(held: Held, messages: list[Any], stream: bool) -> Any:
    tools: Any = [{"type": "function", **TOLD, "parameters": PARAMETERS, "strict": False}]
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


async def ask_messages(held: Held, messages: list[Any], stream: bool) -> Any:
    tools: Any = [{**TOLD, "input_schema": PARAMETERS}]
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


async def chat_words(held: Held, most: int) -> AsyncIterator[str]:
    async with openai_client(held) as client:
        asked: Any = {"messages": [QUESTION], "max_tokens": most}
        async for chunk in await client.chat.completions.create(model="m", stream=True, **asked):
            if chunk.choices and (text := chunk.choices[0].delta.content):
                yield text


async def responses_words(held: Held, most: int) -> AsyncIterator[str]:
    async with openai_client(held) as client:
        asked: Any = {"input": [QUESTION], "max_output_tokens": most}
        async for event in await client.responses.create(model="m", stream=True, **asked):
            if event.type == "response.output_text.delta":
                yield event.delta


async def messages_words(held: Held, most: int) -> AsyncIterator[str]:
    asked: Any = {"messages": [QUESTION], "max_tokens": most}
    async with anthropic_client(held) as client, client.messages.stream(model="m", **asked) as events:
        async for text in events.text_stream:
            yield text


QUESTION: dict[str, Any] = {"role": "user", "content": "12 + 7 - 4 = ?"}
SHARP = Sampling(temperature=0.0, max_tokens=128)


class ClientSuite:
    """The engine serves the shipped policy `tiny`; see EngineSuite."""

    @DIALECTS
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    async def test_a_conversation_with_a_tool_is_one_chain_of_the_engines_tokens(
        self, engine: Engine, ask: Ask, result: Any, stream: bool
    ) -> None:
        async with live_gateway(engine.url, engine.key, sampling=SHARP) as held:
            messages: list[Any] = [QUESTION]
            _, calls, used, said = await ask(held, messages, stream)
            ((call_id, name, arguments),) = calls
            assert name == "bash" and arguments["command"].startswith("echo ")
            assert used == {"in": len(held.engine.prompts[0]), "out": len(held.engine.completions[0].token_ids)}
            messages += [*said, result(call_id, "15")]
            text, calls, used, said = await ask(held, messages, stream)
            assert text and used == {
                "in": len(held.engine.prompts[1]),
                "out": len(held.engine.completions[1].token_ids),
            }
            messages += [*said, *(result(one[0], "15") for one in calls), QUESTION]
            await ask(held, messages, stream)
            (chain,) = held.chains
            assert len(chain.turns) == 3
            as_sampled(held)

    @pytest.mark.parametrize("words", [chat_words, responses_words, messages_words])
    async def test_words_reach_the_client_while_the_engine_has_more_to_sample(
        self, engine: Engine, words: Callable[[Held, int], AsyncIterator[str]]
    ) -> None:
        """The engine is paused at the first word that the client has: what it had not sampled by then came later."""
        for seed in range(8):  # of texts that may end before the pause is there
            wild = Sampling(temperature=2.0, max_tokens=engine.long, seed=seed)
            async with (
                live_gateway(engine.url, engine.key, sampling=wild) as held,
                EngineControl(api_key=engine.key) as control,
            ):
                stream = words(held, engine.long)
                text = await anext(stream)
                await control.pause(engine.url)
                sampled_on = not held.engine.completions
                await control.resume(engine.url)
                text += "".join([word async for word in stream])
                (drawn,) = held.engine.completions
                ids = drawn.token_ids
                assert text == held.chat.decode(ids[:-1] if ids[-1] in held.chat.eos_ids else ids)
                as_sampled(held)
                if sampled_on:
                    return
        raise AssertionError("no first word came before the last token")

    async def test_tokens_that_no_text_brings_back_stay_as_they_were_sampled(self, engine: Engine) -> None:
        wild = Sampling(temperature=2.0, max_tokens=64, seed=5)
        async with live_gateway(engine.url, engine.key, sampling=wild) as held, openai_client(held) as client:
            messages: list[Any] = [QUESTION]
            for _ in range(4):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}, QUESTION]
            as_sampled(held)
            (chain,) = held.chains
            drawn = [chain.token_ids[turn.start : turn.end] for turn in chain.turns]
            assert any(held.chat.encode(held.chat.decode(ids)) != ids for ids in drawn)

    async def test_ends_are_told_as_each_api_tells_them(self, engine: Engine) -> None:
        async with live_gateway(engine.url, engine.key, sampling=SHARP) as held:
            async with openai_client(held) as client:
                chat = await client.chat.completions.create(model="m", messages=[QUESTION], max_tokens=3)  # type: ignore[list-item]
                assert chat.choices[0].finish_reason == "length" and chat.usage is not None
                assert chat.usage.completion_tokens == 3
                response = await client.responses.create(model="m", input=[QUESTION], max_output_tokens=3)  # type: ignore[list-item]
                assert response.status == "incomplete"
                done = await client.completions.create(model="m", prompt="12 + 7 - 4 = ", max_tokens=5)
                assert done.choices[0].finish_reason == "length" and done.usage is not None
            async with anthropic_client(held) as client:
                most = await client.messages.create(model="m", max_tokens=3, messages=[QUESTION])  # type: ignore[list-item]
                assert most.stop_reason == "max_tokens" and most.usage.output_tokens == 3
                tools: Any = [{**TOLD, "input_schema": PARAMETERS}]
                cut = await client.messages.create(
                    model="m",
                    max_tokens=99,
                    messages=[QUESTION],
                    tools=tools,
                    stop_sequences=["echo"],  # type: ignore[list-item]
                )
                assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "echo")
            exact(held)

    @DIALECTS
    async def test_a_history_that_is_too_long_is_said_so(self, engine: Engine, ask: Ask, result: Any) -> None:
        del result
        maker: Any = anthropic if ask is ask_messages else openai
        async with live_gateway(engine.url, engine.key) as held:
            with pytest.raises(maker.BadRequestError, match="maximum context length"):
                await ask(held, [{"role": "user", "content": "a long question " * 1000}], False)
            assert held.engine.prompts == [] and held.chains == []


def as_sampled(held: LiveGateway) -> None:
    """The chains hold exactly what the engine drew: ids, log-probs, versions."""
    exact(held)
    turns = [(chain, turn) for chain in held.chains for turn in chain.turns]
    for (chain, turn), drawn in zip(turns, held.engine.completions, strict=True):
        assert chain.token_ids[turn.start : turn.end] == drawn.token_ids
        assert chain.logprobs[turn.start : turn.end] == array("f", drawn.logprobs).tolist()
        spans = [(span.version, turn.start + span.start, turn.start + span.end) for span in drawn.versions]
        assert spans == [(s.version, s.start, s.end) for s in chain.policy_versions if turn.start <= s.start < turn.end]
