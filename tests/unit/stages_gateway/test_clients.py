"""The makers' own clients against the gateway: chat, responses, messages, completions; streamed or not; with tools."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from stages.errors import LLMError
from tests.support.client_suite import COMMAND, DIALECTS, Ask, anthropic_client, ask_messages, openai_client
from tests.support.gateways import call, exact, gateway


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
