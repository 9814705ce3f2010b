"""Which chain a request goes on from: drift stays as it is, rewritten histories begin chains, retries are no turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from stages.errors import LLMError, PolicyTimeoutError
from stages.gateway.outside import outside
from tests.support.gateways import Gateway, call, exact, gateway
from tests.support.waiting import eventually

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
HELLO = {"role": "user", "content": "hello"}


async def ask(
    held: Gateway,
    messages: list[dict[str, Any]],
    *,
    headers: dict[str, str] | None = None,
    status: int = 200,
    **more: Any,
) -> dict[str, Any]:
    """One chat completion; its message."""
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(
            f"{held.url}/v1/chat/completions", json={"messages": messages, **more},
            headers={"Authorization": f"Bearer {held.session.token}", **(headers or {})},
        )  # fmt: skip
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    return dict(body["choices"][0]["message"]) if status == 200 else dict(body["error"])


async def test_sampled_ids_that_no_encoding_gives_stay_as_they_are() -> None:
    async with gateway(["?"]) as held:
        drifting = [held.chat.encode(letter)[0] for letter in "The answer"] + held.chat.encode("<|im_end|>")
        assert held.chat.encode(held.chat.decode(drifting)) != drifting  # one id a letter: the tokenizer merges them
    async with gateway([drifting, "ok"]) as held:
        reply = await ask(held, [HELLO])
        await ask(held, [HELLO, reply, {"role": "user", "content": "go on"}])
        (chain,) = held.chains
        start, end = chain.turns[0].start, chain.turns[0].end
        assert chain.token_ids[start:end] == drifting
        assert held.engine.prompts[1][start:end] == drifting
        exact(held)


async def test_a_rewritten_history_gives_several_exact_chains() -> None:
    async with gateway([f"answer {n}" for n in range(6)]) as held:
        first = await ask(held, [HELLO])
        second = await ask(held, [HELLO, first, {"role": "user", "content": "and then?"}])
        history = [HELLO, first, {"role": "user", "content": "and then?"}, second]
        await ask(held, [HELLO, first, {"role": "user", "content": "otherwise?"}])  # back to the first turn
        await ask(held, [{"role": "user", "content": "summary: hello, answer 0"}])  # compacted
        await ask(held, [HELLO, {"role": "assistant", "content": "nobody said so"}, {"role": "user", "content": "?"}])
        await ask(held, [*history, {"role": "user", "content": "on with the first"}])
        assert [len(chain.turns) for chain in held.chains] == [3, 1, 1, 1]
        forked, compacted, invented = held.chains[1:]
        shared = held.chains[0].turns[0].end
        assert forked.token_ids[:shared] == held.chains[0].token_ids[:shared]
        assert forked.prompt_length > shared and set(forked.loss_mask[: forked.prompt_length]) == {0}
        assert "nobody said so" in held.chat.decode(invented.token_ids[: invented.prompt_length])
        assert compacted.turns[0].start == compacted.prompt_length
        exact(held)


async def test_other_tools_are_another_prompt() -> None:
    async with gateway(["a", "b"]) as held:
        reply = await ask(held, [HELLO])
        await ask(held, [HELLO, reply, {"role": "user", "content": "on"}], tools=TOOLS)
        assert len(held.chains) == 2
        exact(held)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: {**said, "content": "I look!"},
        lambda said: {**said, "tool_calls": []},
        lambda said: json.loads(json.dumps(said).replace("ls", "rm")),
        lambda said: json.loads(json.dumps(said).replace("call_00000001", "call_x")),
    ],
    ids=["content", "no-calls", "arguments", "id"],
)
async def test_a_reply_that_was_changed_is_not_taken_for_the_sampled_one(change: Any) -> None:
    async with gateway([f"I look.\n{call('bash', json.dumps({'command': 'ls'}))}", "b", "c"]) as held:
        said = await ask(held, [HELLO], tools=TOOLS)
        result = {"role": "user", "content": "a.txt"}
        await ask(held, [HELLO, change(said), result], tools=TOOLS)
        assert [len(chain.turns) for chain in held.chains] == [1, 1]
        await ask(held, [HELLO, {**said, "content": "\nI look. "}, result], tools=TOOLS)
        assert [len(chain.turns) for chain in held.chains] == [2, 1]
        exact(held)


async def test_a_client_that_left_gets_the_same_answer_when_it_comes_again() -> None:
    async with gateway(["the one answer", "another"]) as held:
        held.engine.hold.clear()
        leaving = asyncio.create_task(ask(held, [HELLO]))
        await eventually(lambda: held.engine.prompts, "a generation")
        leaving.cancel()
        await asyncio.wait({leaving})
        await eventually(lambda: all(e.waiting == 0 for e in held.session._exchanges), "the client left")
        again = asyncio.create_task(ask(held, [HELLO]))
        held.engine.hold.set()
        assert (await again)["content"] == "the one answer"
        assert held.session.turns == len(held.engine.prompts) == 1 and len(held.chains[0].turns) == 1
        marked = {"x-stainless-retry-count": "1"}
        assert (await ask(held, [HELLO], headers=marked))["content"] == "the one answer"
        assert held.session.turns == 1
        assert (await ask(held, [HELLO]))["content"] == "another"  # it had its answer: it wants another sample
        assert held.session.turns == 2 and len(held.chains) == 2
        exact(held)


async def test_requests_at_once_have_chains_of_their_own() -> None:
    async with gateway(lambda prompt: f"length {len(prompt)}", max_turns=64) as held:
        first = await ask(held, [HELLO])
        asks = [ask(held, [HELLO, first, {"role": "user", "content": "x" * n}]) for n in range(1, 21)]
        replies = await asyncio.gather(*asks)
        assert all(reply["content"].startswith("length") for reply in replies)
        assert sorted(len(chain.turns) for chain in held.chains) == [1] * 19 + [2]
        exact(held)


async def test_a_turn_that_failed_leaves_its_chain_as_it_was() -> None:
    async with gateway(["one", LLMError("gone")]) as held:
        first = await ask(held, [HELLO])
        before = held.chains[0]
        await ask(held, [HELLO, first, {"role": "user", "content": "two"}], status=503)
        assert held.chains == [before]
        refused = await ask(held, [HELLO], status=403)
        assert "the session has ended: gone" in refused["message"]
        assert isinstance(held.session.failure, LLMError)


async def test_a_history_that_became_too_long_may_be_compacted() -> None:
    async with gateway(["one", "two"], context=120) as held:
        first = await ask(held, [HELLO])
        long = [HELLO, first, {"role": "user", "content": "word " * 200}]
        error = await ask(held, long, status=400)
        assert error["code"] == "context_length_exceeded" and held.session.full is not None
        await ask(held, [{"role": "user", "content": "short"}])
        assert held.session.full is None and held.session.turns == 2
        exact(held)


async def test_nothing_is_answered_once_the_session_is_closed() -> None:
    async with gateway(["one"]) as held:
        held.engine.hold.clear()
        waiting = asyncio.create_task(ask(held, [HELLO]))
        await eventually(lambda: held.engine.prompts, "a generation")
        await held.session.close()
        with pytest.raises(AssertionError, match="the session has ended"):
            await waiting
        assert (await ask(held, [HELLO], status=401))["code"] == "invalid_api_key"
        assert held.chains == []


async def test_an_agent_outside_needs_the_path_alone() -> None:
    async with gateway(["one"]) as held:
        body = {"messages": [HELLO]}
        with pytest.raises(PolicyTimeoutError, match="more than 1 turns"):
            async with outside(held.model, max_turns=1) as found, httpx.AsyncClient() as client:
                answer = await client.post(f"{found.url}/v1/chat/completions", json=body)
                assert answer.json()["choices"][0]["message"]["content"] == "one"
                assert found.session.end() is None
                assert (await client.post(f"{found.url}/v1/chat/completions", json=body)).status_code == 403
                assert found.session.spent and found.session.turns == 1
        with pytest.raises(httpx.ConnectError):
            httpx.post(f"{found.url}/v1/chat/completions", json=body)
        exact(held)


async def test_an_engine_that_fails_an_agent_outside_is_no_reward() -> None:
    async with gateway([LLMError("gone"), LLMError("gone again")]) as held, httpx.AsyncClient() as client:
        for swallows in (True, False):
            with pytest.raises(LLMError, match="gone"):
                async with outside(held.model, max_turns=4) as found:
                    answer = await client.post(f"{found.url}/v1/chat/completions", json={"messages": [HELLO]})
                    if not swallows:
                        answer.raise_for_status()
        with pytest.raises(ZeroDivisionError):  # what the session knows nothing of is the agent's
            async with outside(held.model, max_turns=4):
                1 / 0  # noqa: B018


async def test_what_a_client_makes_too_deep_or_out_of_vocabulary_is_refused_and_costs_the_rollout_nothing() -> None:
    async with gateway(lambda prompt: "one", max_turns=64) as held:
        key = {"Authorization": f"Bearer {held.session.token}"}
        async with httpx.AsyncClient(headers=key) as client:
            refused = set()
            for depth in range(900, 1000, 2):  # some of them msgspec still reads, and the template cannot write
                parameters = '{"x": ' + "[" * depth + "]" * depth + "}"
                tools = '[{"type": "function", "function": {"name": "f", "parameters": ' + parameters + "}}]"
                body = f'{{"messages": [{{"role": "user", "content": "hello"}}], "tools": {tools}, "max_tokens": 1}}'
                answer = await client.post(f"{held.url}/v1/chat/completions", content=body)
                if answer.status_code != 200:
                    refused.add(answer.json()["error"]["message"].partition(":")[0])
        assert refused == {"the request is nested too deeply", "the body is not valid JSON"}
        assert held.session.failure is None and held.session.turns == len(held.engine.prompts)
        asked = held.session.turns
        async with httpx.AsyncClient(headers=key) as client:
            for prompt in ([1, held.chat.vocab_size], [2**31], [-1], [True]):
                answer = await client.post(f"{held.url}/v1/completions", json={"prompt": prompt})
                assert answer.status_code == 400 and "prompt" in answer.json()["error"]["param"], prompt
        assert held.session.failure is None and held.session.turns == asked
        exact(held)


async def test_counts_leave_a_full_context_full_and_have_a_bound() -> None:
    async with gateway([], context=8, max_turns=1) as held:
        await ask(held, [HELLO], status=400)
        assert held.session.full is not None
        key = {"Authorization": f"Bearer {held.session.token}"}
        async with httpx.AsyncClient(headers=key) as client:
            body = {"messages": [HELLO]}
            statuses = [
                (await client.post(f"{held.url}/v1/messages/count_tokens", json=body)).status_code for _ in range(17)
            ]
        assert statuses == [200] * 16 + [403]
        assert held.session.full is not None and held.session.turns == 0 and not held.session._exchanges


async def test_a_long_text_leaves_the_event_loop_to_others() -> None:
    async with gateway([]) as held:
        text = "word and \n other (x) " * 20_000
        asyncio.get_running_loop().slow_callback_duration = 0.05
        asked = asyncio.create_task(ask(held, [{"role": "user", "content": text}], status=400))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert (await asked)["code"] == "context_length_exceeded" and turns > 20


async def test_the_capability_is_a_path_as_well_as_a_key() -> None:
    async with gateway(["one"]) as held, httpx.AsyncClient() as client:
        body = {"messages": [HELLO]}
        path = f"{held.url}/cap/{held.session.token}/v1/chat/completions"
        assert (await client.post(path, json=body)).status_code == 200
        assert (await client.post(f"{held.url}/cap/wrong/v1/chat/completions", json=body)).status_code == 401
        assert (await client.post(f"{held.url}/v1/chat/completions", json=body)).status_code == 401
        assert (await client.post(f"{held.url}/cap/{held.session.token}/pause", json=body)).status_code == 404
        assert (await client.get(path)).status_code == 405
