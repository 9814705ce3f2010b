"""Streams while their turns are sampled: what comes when, that all of it is the whole answer, and what breaks them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from stages.dialects import Completion, Piece
from stages.gateway import answering
from stages.gateway import session as sessions
from stages.gateway.live import Decoding, Holding, Live
from stages.hearing import Heard
from stages.http import RouterLink
from stages.pools.sessions import AttemptSession
from stages.trajectory import Sampling, VersionSpan
from stages.wire import SessionOut
from tests.support.gateways import Gateway, call, exact, gateway
from tests.support.waiting import eventually

HELLO = {"role": "user", "content": "hello"}
FUNCTION = {"name": "bash", "parameters": {"type": "object", "properties": {}}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [HELLO], "tools": [{"type": "function", "function": FUNCTION}],
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": "Say it: ", "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": [HELLO], "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": [HELLO], "max_tokens": 400,
                     "tools": [{"name": "bash", "input_schema": FUNCTION["parameters"]}]},
}  # fmt: skip
STOPS = {"/v1/chat/completions": "stop", "/v1/completions": "stop", "/v1/messages": "stop_sequences"}
Event = dict[str, Any]


@contextlib.asynccontextmanager
async def streaming(held: Gateway, route: str, **more: Any) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of a stream, one after the other as they come; pings as {"type": "ping"}."""
    headers = {"Authorization": f"Bearer {held.session.token}"}
    body = {**ROUTES[route], **more, "stream": True}

    async def events(response: httpx.Response) -> AsyncIterator[Event]:
        async for line in response.aiter_lines():
            if line.startswith(":"):
                yield {"type": "ping"}
            elif line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))

    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(timeout=20, headers=headers, verify=False) as client,
        client.stream("POST", held.url + route, json=body) as response,
    ):
        assert response.status_code == 200
        yield events(response)


def delta(event: Event) -> str:
    """The text that an event adds to the content."""
    if "choices" in event:
        choice = event["choices"][0] if event["choices"] else {}
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    if event["type"] == "response.output_text.delta":
        return str(event["delta"])
    return str(event.get("delta", {}).get("text") or "") if event["type"] == "content_block_delta" else ""


def told(route: str, events: list[Event]) -> dict[str, Any]:
    """What a stream came to, in the shape of `said`."""
    content, calls = "".join(map(delta, events)), list[Any]()
    if route == "/v1/responses":
        return {**said(route, events[-1]["response"]), "content": content}
    if route == "/v1/messages":
        assert [e["type"] for e in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
        for event in events:
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                calls.append([event["content_block"]["name"], ""])
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                calls[-1][1] += event["delta"]["partial_json"]
        end = events[-2]
        return {"content": content, "calls": [(n, json.loads(a)) for n, a in calls], "usage": end["usage"],
                "finish": [end["delta"]["stop_reason"], end["delta"]["stop_sequence"]]}  # fmt: skip
    *parts, used = events
    for event in parts:
        for one in event["choices"][0].get("delta", {}).get("tool_calls", []):
            if "name" in one["function"]:
                calls.append([one["function"]["name"], ""])
            calls[one["index"]][1] += one["function"]["arguments"]
    return {"content": content, "calls": [(n, json.loads(a)) for n, a in calls], "usage": used["usage"],
            "finish": [parts[-1]["choices"][0]["finish_reason"]]}  # fmt: skip


def said(route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Content, calls, usage and end of a whole answer."""
    if route == "/v1/responses":
        calls = [(one["name"], json.loads(one["arguments"])) for one in body["output"] if one["type"] != "message"]
        texts = [one["content"][0]["text"] for one in body["output"] if one["type"] == "message"]
        return {"content": "".join(texts), "calls": calls, "usage": body["usage"],
                "finish": [body["status"], body["incomplete_details"]]}  # fmt: skip
    if route == "/v1/messages":
        calls = [(one["name"], one["input"]) for one in body["content"] if one["type"] == "tool_use"]
        texts = [one["text"] for one in body["content"] if one["type"] == "text"]
        return {"content": "".join(texts), "calls": calls, "usage": body["usage"],
                "finish": [body["stop_reason"], body["stop_sequence"]]}  # fmt: skip
    choice = body["choices"][0]
    message = choice.get("message", {})
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    return {"content": choice.get("text") or message.get("content") or "", "calls": calls, "usage": body["usage"],
            "finish": [choice["finish_reason"]]}  # fmt: skip


async def whole(held: Gateway, route: str, **more: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {held.session.token}"}
    async with httpx.AsyncClient(timeout=20, headers=headers, verify=False) as client:
        body = {**ROUTES[route], **more}
        body.pop("stream_options", None)
        answer = await client.post(held.url + route, json=body)
    assert answer.status_code == 200, answer.text
    return said(route, answer.json())


@pytest.mark.parametrize("route", ROUTES)
async def test_the_first_words_come_while_the_turn_is_still_sampled(route: str) -> None:
    async with gateway(["The answer is nineteen, as far as I know."]) as held:
        held.engine.said = 4
        async with streaming(held, route) as events:
            got = []
            async for event in events:
                got.append(event)
                if delta(event) and not held.engine.go_on.is_set():
                    assert held.session.turns == 1 and not held.chains[0].turns  # nothing is captured yet
                    held.engine.go_on.set()
        assert held.engine.go_on.is_set() and told(route, got)["content"].endswith("as far as I know.")
        if route == "/v1/chat/completions":
            assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        exact(held)


BITS = ["I look.", " ", "\n", "\n\n", "naïve ✓ 世界 😀", "<tool_call>", "<tool", "</tool_call>", "<", "Observation:",
        "\nObs", call("bash", '{"command": "ls"}'), call("bash", '{"command": "echo \\"</tool_call>\\""}'),
        "<tool_call>no json</tool_call>", "<|im_end|>", "\ufffd"]  # fmt: skip


async def test_what_a_stream_comes_to_is_the_whole_answer_and_the_same_rows() -> None:
    draw = random.Random(9)
    async with gateway(["?"]) as held:
        vocabulary, end = held.chat.vocab_size, held.chat.encode("<|im_end|>")
        says: list[Any] = []
        for number in range(120):
            ids = held.chat.encode("".join(draw.choices(BITS, k=draw.randint(1, 7))))
            if number % 3 == 0:  # bytes that are no characters, too
                ids = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 30))]
            says.append([*ids, *(end if draw.random() < 0.7 else [])])
    async with (
        gateway(says[:], max_turns=200, context=10**6) as one,
        gateway(says[:], max_turns=200, context=10**6) as other,
    ):
        other.engine.split = lambda ids: cut(draw, ids)
        lively = 0
        for number in range(len(says)):
            route = list(ROUTES)[number % 4]
            more: dict[str, Any] = {}
            if route in STOPS and draw.random() < 0.5:
                more[STOPS[route]] = draw.choice(
                    [["\nObservation:"], ["Obs", "bser"], ["\n\n"], ["世"], ["<|im_end|>"]]
                )
            expected = await whole(one, route, **more)
            async with streaming(other, route, **more) as events:
                got = [event async for event in events]
            assert told(route, got) == expected, (number, route, more, one.chat.decode(says[number]))
            lively += len([event for event in got if delta(event)]) > 1
        assert lively > 20
        assert [shape(chain) for chain in other.chains] == [shape(chain) for chain in one.chains]
        exact(other)


def cut(draw: random.Random, ids: list[int]) -> list[list[int]]:
    """The ids in pieces of random lengths."""
    places = sorted({0, len(ids), *(draw.randrange(len(ids) + 1) for _ in range(draw.randint(0, 12)))})
    return [ids[start:end] for start, end in itertools.pairwise(places)]


def shape(chain: Any) -> Any:
    """What of a chain is not time."""
    turns = [(turn.start, turn.end, turn.finish_reason, turn.cached_tokens) for turn in chain.turns]
    return chain.token_ids, chain.loss_mask, chain.logprobs, chain.policy_versions, turns


async def test_a_replica_that_breaks_off_amid_a_stream_is_gone_on_from() -> None:
    async with gateway(["The answer is nineteen."], patience_s=10) as held:
        ids = [*held.chat.encode("The answer is nineteen."), *held.chat.encode("<|im_end|>")]
    async with gateway([ids, ids[5:], ids[6:]], patience_s=10) as held:
        held.engine.breaks, held.engine.said = [5, 1], 5
        async with streaming(held, "/v1/chat/completions") as events:
            got = []
            async for event in events:
                got.append(event)
                if delta(event):
                    held.engine.said = None
                    held.engine.go_on.set()
        assert told("/v1/chat/completions", got)["content"] == "The answer is nineteen."
        (chain,) = held.chains
        (turn,) = chain.turns
        assert chain.token_ids[turn.start : turn.end] == ids and turn.finish_reason == "stop"
        assert held.engine.prompts[1] == chain.token_ids[: turn.start + 5]
        assert [(s.start, s.end) for s in chain.policy_versions] == [(turn.start, turn.end)]
        exact(held)


async def test_replicas_that_stream_and_such_that_do_not_may_share_a_turn() -> None:
    async with gateway([]) as held:
        ids = [*held.chat.encode("The answer is nineteen."), *held.chat.encode("<|im_end|>")]
        streamed = held.engine.generate

        async def generate(url: str, token_ids: Any, sampling: Sampling, **more: Any) -> Completion:
            if held.engine.prompts:
                return await streamed(url, token_ids, sampling, **more)
            held.engine.prompts.append(list(token_ids))
            return Completion(ids[:4], [-1.0] * 4, "abort", [VersionSpan(3, 0, 4)], 0, 0.001)

        held.engine._says, held.engine.generate = [ids[4:]], generate  # type: ignore[method-assign]
        held.model._patience_s = 10.0
        async with streaming(held, "/v1/chat/completions") as events:
            got = [event async for event in events]
        assert told("/v1/chat/completions", got)["content"] == "The answer is nineteen."
        exact(held)


async def test_a_client_that_leaves_its_stream_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEFT_S", 0.01)
    async with gateway(["The answer is nineteen.", "another"]) as held:
        held.engine.said = 3
        async with streaming(held, "/v1/messages") as events:
            async for event in events:
                if delta(event):
                    break
        await eventually(lambda: held.engine.cancelled == 1, "the generation is cancelled")
        await eventually(lambda: held.chains == [], "its turn did not come about")
        assert held.session.turns == 1 and held.session.failure is None and held.model.unanswered is None
        assert (await whole(held, "/v1/messages"))["content"] == "another"
        exact(held)


async def test_a_stream_that_is_asked_for_again_begins_anew_and_goes_on() -> None:
    async with gateway(["The answer is nineteen."]) as held:
        held.engine.said = 3
        async with streaming(held, "/v1/responses") as events:
            async for event in events:
                if delta(event):
                    break
        async with streaming(held, "/v1/responses") as events:
            got = []
            async for event in events:
                got.append(event)
                if delta(event):
                    held.engine.go_on.set()
        assert told("/v1/responses", got)["content"] == "The answer is nineteen."
        assert held.session.turns == len(held.engine.prompts) == 1 and held.engine.cancelled == 0


async def test_a_stream_with_nothing_to_show_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "QUIET_S", 0.01)
    async with gateway([call("bash", '{"command": "ls"}')]) as held:
        held.engine.said = 4
        async with streaming(held, "/v1/chat/completions") as events:
            got, pings = [], 0
            async for event in events:
                pings += event.get("type") == "ping"
                if pings == 3:
                    held.engine.go_on.set()
                if event.get("type") != "ping":
                    got.append(event)
        assert pings >= 3 and told("/v1/chat/completions", got)["calls"] == [("bash", {"command": "ls"})]


async def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    text = "word " * 60_000
    async with gateway([text], context=10**6, sampling=Sampling(max_tokens=10**6)) as held:
        held.engine.split = lambda ids: [ids[n : n + 64] for n in range(0, len(ids), 64)]
        body = json.dumps({"prompt": "Say it: ", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {held.session.token}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(held.url.rpartition(":")[2]), limit=1024)
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await eventually(lambda: held.chains and held.chains[0].turns, "the turn is whole")
        got = (await reader.read()).decode()
        writer.close()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in got.splitlines() if line.startswith("data: {")]
    assert "".join(texts) == text


def test_what_may_become_something_else_is_held_back() -> None:
    holding = Holding(["\nObservation:", "STOP"], "hermes")
    shown = [holding.more(one) for one in ("\n I", " look. \nObs", "erve", "d <tool", "s> S", "TO", "Ps")]
    assert shown == ["I", " look.", " \nObserve", "d", " <tools>", "", ""]
    holding = Holding([], "hermes")
    assert [holding.more(one) for one in ("so <tool_ca", "ll>{} </tool_call> and")] == ["so", ""]
    holding = Holding(["cd", "abcdef"], None)
    assert [holding.more(one) for one in ("x abcd", "e", "g", "more")] == ["x ", "", "ab", ""]
    for start, shows in (("[", ""), (" <think>", ""), ("Well, [f(", "Well, [f(")):
        assert Holding([], "python").more(start + "x") == (shows and shows + "x")
    assert Holding(["x" * 5000], None).more("anything") == ""


def test_a_character_comes_whole() -> None:
    text = "a😀b"
    ids = list(text.encode())
    decoding = Decoding(lambda some: bytes(some).decode("utf-8", "replace"), chr)
    assert [decoding.more([one]) for one in ids] == ["a", "", "", "", "😀", "b"]


def test_a_run_of_bytes_is_decided_by_what_follows_it() -> None:
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁Hello", "▁world", "!", "a"]
    tokenizer = Tokenizer(BPE(vocab={word: n for n, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])  # as Llama 2 has it
    draw = random.Random(3)
    for _ in range(300):
        ids = [draw.randrange(256, 260) if draw.random() < 0.6 else draw.choice("é😀".encode()) for _ in range(9)]
        decoding = Decoding(tokenizer.decode, words.__getitem__)
        shown = "".join(decoding.more([one]) for one in ids)
        assert tokenizer.decode(ids).startswith(shown)
        assert len(shown) > 2 or ids[-1] < 256


def test_what_nobody_was_shown_is_sampled_anew_and_what_was_shown_stays() -> None:
    live = Live(lambda ids: "x" * len(ids), chr, {0}, (), None)
    heard = Heard(live)
    heard(Piece([1, 2], [-1.0, -2.0], None, [], None, True))
    assert heard.broken_off(7, "abort") is None and not live.begun
    heard = Heard(live)
    heard(Piece([1, 2], [-1.0, -2.0], None, [], None, True))
    assert live.texts() == ["xx"]
    part = heard.broken_off(7, "abort")
    assert part is not None and (part.token_ids, part.logprobs, part.finish_reason) == ([1, 2], [-1.0, -2.0], "abort")
    assert [(span.version, span.start, span.end) for span in part.versions] == [(7, 0, 2)]
    heard(Piece([3, 0], [-1.0, -2.0], "stop", [], None, True))  # what follows the end is not worth asking again
    last = heard.broken_off(7, "abort")
    assert last is not None and (last.token_ids, last.finish_reason) == ([1, 2, 3, 0], "stop")


async def test_a_replica_that_the_router_knows_to_be_down_is_gone_on_from_too() -> None:
    class Router:
        async def call(self, *_: object, **__: object) -> SessionOut:
            return SessionOut("1", "replica-2", "http://replica-2", 3)

    async with gateway(["The answer is nineteen.", "een."]) as held:
        attempt = AttemptSession(cast(RouterLink, Router()), held.engine, "r-1", 1)
        attempt.given(SessionOut("1", "replica-1", "http://replica-1", 3))
        held.model._engine, held.model._open_session, held.model._patience_s = attempt, attempt.open, 10.0
        held.engine.said = len(held.chat.encode("The answer is nineteen.")) - len(held.chat.encode("een."))
        async with streaming(held, "/v1/messages") as events:
            got = []
            async for event in events:
                got.append(event)
                if len("".join(map(delta, got))) >= len("The answer is") and held.engine.said is not None:
                    held.engine.said = None
                    attempt.lost()
        assert held.engine.cancelled == 1 and len(held.engine.prompts) == 2
        (chain,) = held.chains
        (turn,) = chain.turns
        assert turn.replica == "replica-2" and held.engine.prompts[1] == chain.token_ids[: len(held.engine.prompts[1])]
        assert told("/v1/messages", got)["content"].startswith("The answer is")
        assert told("/v1/messages", got)["content"] + "<|im_end|>" == held.chat.decode(chain.token_ids[turn.start :])
        exact(held)
