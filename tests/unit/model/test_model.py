"""The token stream: sampled ids stay as they are, prompts are the stream so far, rewritten histories begin a chain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.chat import ChatTokenizer
from stages.engine_client import Completion, EngineUnavailableError
from stages.errors import ContextLengthError, LLMError
from stages.model import StreamModel
from stages.pools.run import RunHand
from stages.pools.sessions import AttemptSession
from stages.trajectory import Message, Sampling, VersionSpan
from stages.wire import SessionOut
from tests.support.waiting import eventually
from workflows.tools.bash import SCHEMA

POLICY = Path(__file__).parents[3] / "workflows" / "policies" / "tiny"
USER = [Message("user", "12 + 7 = ?")]


class ScriptedEngine:
    """Answers with given ids, or raises; remembers every prompt that it was sent."""

    def __init__(self, answers: Sequence[list[int] | Exception], context: int = 2048) -> None:
        self._answers = list(answers)
        self._context = context
        self.prompts: list[list[int]] = []
        self.urls: list[str] = []
        self.samplings: list[Sampling] = []

    async def context_length(self, url: str) -> int:
        return self._context

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float
    ) -> Completion:
        self.prompts.append(list(token_ids))
        self.urls.append(url)
        self.samplings.append(sampling)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        logprobs = [-0.5 - i for i in range(len(answer))]
        return Completion(answer, logprobs, "stop", [VersionSpan(3, 0, len(answer))], 4, 0.01)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer.load(POLICY)


def model_on(engine: ScriptedEngine, chat: ChatTokenizer, sampling: Sampling | None = None) -> StreamModel:
    opened: list[str | None] = []

    async def open_session(failed: str | None) -> SessionOut:
        opened.append(failed)
        return SessionOut("1", f"r{len(opened)}", f"http://r{len(opened)}", 3)

    model = StreamModel(engine, open_session, chat, sampling or Sampling(), name="t", patience_s=0.3)  # type: ignore[arg-type]
    model.opened = opened  # type: ignore[attr-defined]
    return model


def call_text(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


async def test_each_prompt_is_the_stream_so_far_and_masks_tell_who_spoke(chat: ChatTokenizer) -> None:
    eos = sorted(chat.eos_ids)[-1]
    first = [*chat.encode(call_text("echo 19")), chat.encode("<|im_end|>")[0]]
    second = [*chat.encode("The answer is 19."), chat.encode("<|im_end|>")[0]]
    assert first[-1] in chat.eos_ids and eos
    engine = ScriptedEngine([first, second])
    model = model_on(engine, chat)
    messages = list(USER)
    reply = await model.generate(messages=messages, tools=[SCHEMA])
    assert reply.tool_calls[0].arguments == {"command": "echo 19"}
    messages += [reply, Message("tool", "19", tool_call_id=reply.tool_calls[0].id)]
    last = await model.generate(messages=messages, tools=[SCHEMA])
    assert last.content == "The answer is 19."
    (chain,) = model.trajectory().chains
    assert engine.prompts[0] == chain.token_ids[: chain.prompt_length]
    assert engine.prompts[1] == chain.token_ids[: chain.turns[1].start]
    assert engine.prompts[1][: len(engine.prompts[0]) + len(first)] == engine.prompts[0] + first
    for turn, ids in zip(chain.turns, (first, second), strict=True):
        assert chain.token_ids[turn.start : turn.end] == ids
        assert set(chain.loss_mask[turn.start : turn.end]) == {1}
    assert sum(chain.loss_mask) == len(first) + len(second)
    assert [(s.version, s.start, s.end) for s in chain.policy_versions] == [
        (3, turn.start, turn.end) for turn in chain.turns
    ]
    assert chat.decode(chain.token_ids) + "\n" == chat.render([*messages, last], [SCHEMA], add_generation_prompt=False)


async def test_sampled_ids_that_encoding_would_change_are_kept(chat: ChatTokenizer) -> None:
    odd = [chat.encode(letter)[0] for letter in "answer"] + [chat.encode("<|im_end|>")[0]]
    assert chat.encode(chat.decode(odd)) != odd
    more = [*chat.encode("ok"), chat.encode("<|im_end|>")[0]]
    engine = ScriptedEngine([odd, more])
    model = model_on(engine, chat)
    reply = await model.generate(messages=USER)
    await model.generate(messages=[*USER, reply, Message("user", "go on")])
    (chain,) = model.trajectory().chains
    assert chain.token_ids[chain.turns[0].start : chain.turns[0].end] == odd
    assert engine.prompts[1][len(engine.prompts[0]) :][: len(odd)] == odd


async def test_an_answer_cut_by_its_length_is_closed_by_an_unsampled_end_of_turn(chat: ChatTokenizer) -> None:
    cut, more = chat.encode("The answer"), [*chat.encode("ok"), chat.encode("<|im_end|>")[0]]
    engine = ScriptedEngine([cut, more])
    model = model_on(engine, chat)
    reply = await model.generate(messages=USER)
    await model.generate(messages=[*USER, reply, Message("user", "go on")])
    (chain,) = model.trajectory().chains
    end = chain.turns[0].end
    assert chain.token_ids[end] in chat.eos_ids and chain.loss_mask[end] == 0


async def test_a_history_that_was_rewritten_begins_a_new_chain(chat: ChatTokenizer) -> None:
    answer = [*chat.encode("ok"), chat.encode("<|im_end|>")[0]]
    engine = ScriptedEngine([answer, answer])
    model = model_on(engine, chat)
    await model.generate(messages=USER)
    await model.generate(messages=[Message("user", "something else")])
    chains = model.trajectory().chains
    assert len(chains) == 2 and all(len(chain.turns) == 1 for chain in chains)
    assert engine.prompts[1] == chains[1].token_ids[: chains[1].prompt_length]


async def test_a_replica_that_fails_is_named_and_another_one_goes_on_with_the_same_stream(chat: ChatTokenizer) -> None:
    answer = [*chat.encode("ok"), chat.encode("<|im_end|>")[0]]
    engine = ScriptedEngine([EngineUnavailableError("gone"), answer])
    model = model_on(engine, chat)
    await model.generate(messages=USER)
    assert model.opened == [None, "r1"]  # type: ignore[attr-defined]
    assert engine.urls == ["http://r1", "http://r2"] and engine.prompts[0] == engine.prompts[1]


async def test_a_fleet_that_never_answers_is_given_up_by_the_deadline(chat: ChatTokenizer) -> None:
    engine = ScriptedEngine([EngineUnavailableError("gone")] * 100)
    with pytest.raises(LLMError, match="no replica answered"):
        await model_on(engine, chat).generate(messages=USER)
    assert len(engine.prompts) < 10


async def test_a_full_context_ends_the_trajectory_and_max_tokens_never_passes_it(chat: ChatTokenizer) -> None:
    answer = [*chat.encode("ok"), chat.encode("<|im_end|>")[0]]
    prompt = len(chat.encode(chat.render(USER)))
    engine = ScriptedEngine([answer], context=prompt + 5)
    await model_on(engine, chat, Sampling(max_tokens=64)).generate(messages=USER)
    assert engine.samplings[0].max_tokens == 5
    full = ScriptedEngine([answer], context=prompt)
    with pytest.raises(ContextLengthError):
        await model_on(full, chat).generate(messages=USER)
    assert full.prompts == []


async def test_a_seed_gives_every_turn_its_own_and_the_same_one_again(chat: ChatTokenizer) -> None:
    answer = [*chat.encode("ok"), chat.encode("<|im_end|>")[0]]
    seeds = []
    for _ in range(2):
        engine = ScriptedEngine([answer, answer])
        model = model_on(engine, chat, Sampling(seed=7))
        reply = await model.generate(messages=USER)
        await model.generate(messages=[*USER, reply, Message("user", "go on")])
        seeds.append([sampling.seed for sampling in engine.samplings])
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]


async def test_what_was_said_and_not_sampled_has_nothing_to_train_on(chat: ChatTokenizer) -> None:
    model = model_on(ScriptedEngine([]), chat)
    model.say(messages=USER, reply=Message("assistant", "The answer is 19."))
    trajectory = model.trajectory()
    (chain,) = trajectory.chains
    assert sum(chain.loss_mask) == 0 and chain.turns == []
    assert trajectory.messages[-1].content == "The answer is 19."
    assert "The answer is 19." in chat.decode(chain.token_ids)


async def test_a_call_that_the_fleet_fails_to_answer_says_so_until_it_is_answered(chat: ChatTokenizer) -> None:
    answer = [*chat.encode("ok"), chat.encode("<|im_end|>")[0]]
    model = model_on(ScriptedEngine([EngineUnavailableError("gone"), answer]), chat)
    told: list[str | None] = []
    opening = model._open_session

    async def open_session(failed: str | None) -> SessionOut:
        told.append(model.unanswered)
        return await opening(failed)

    model._open_session = open_session
    await model.generate(messages=USER)
    assert told == [None, "gone"] and model.unanswered is None


@pytest.mark.parametrize("away", [True, False])
async def test_a_budget_that_ends_while_the_fleet_is_away_is_not_the_policys_fault(
    chat: ChatTokenizer, away: bool
) -> None:
    failures = [EngineUnavailableError("gone", retry_after_s=30.0)] if away else []
    model = model_on(ScriptedEngine([*failures, chat.encode("<|im_end|>")]), chat)
    model._patience_s = 60.0

    async def run(row: object, *_: object) -> None:
        await model.generate(messages=USER)
        await asyncio.Event().wait()

    hand = SimpleNamespace(_agent=SimpleNamespace(run=run), _limits=None)
    given = SimpleNamespace(budget=0.2, payload={})
    running = RunHand._run_agent(hand, given, model, None, SimpleNamespace(spent_s=0.0), None)  # type: ignore[arg-type]
    if away:
        with pytest.raises(LLMError, match=r"the fleet was away when the attempt's 0\.2 s ended: gone"):
            await running
    else:
        assert (await running)[0] == "policy_timeout"


async def test_chains_that_sample_at_once_fail_and_are_given_up_each_for_itself(chat: ChatTokenizer) -> None:
    class Link:
        async def call(self, *_: object, answer: type[SessionOut]) -> SessionOut:
            return answer("1", "r1", "http://r1", 3, ask_again_s=60.0)

    class Hung:
        asked = 0

        async def context_length(self, url: str) -> int:
            return 2048

        async def generate(self, url: str, token_ids: Sequence[int], *_: object, **__: object) -> Completion:
            self.asked += 1
            if self.asked == 1:
                raise EngineUnavailableError("r1: broken")
            await asyncio.Event().wait()
            raise AssertionError

    engine = Hung()
    session = AttemptSession(Link(), engine, "g1-0", 1)  # type: ignore[arg-type]
    model = StreamModel(session, session.open, chat, Sampling(), name="t", patience_s=30.0)
    away = asyncio.create_task(model.sample(model.branch([1, 2])))
    await eventually(lambda: model.unanswered, "a failure")
    others = [asyncio.create_task(session.generate("http://r1", [1], Sampling(), name="t", timeout_s=9)) for _ in "ab"]
    other = asyncio.create_task(model.sample(model.branch([3, 4])))
    await eventually(lambda: engine.asked >= 4, "generations at once")
    assert model.unanswered == "r1: broken"  # the first chain's, although another samples
    session.lost()
    for given_up in others:
        with pytest.raises(EngineUnavailableError, match="the router says that it is down"):
            await asyncio.wait_for(given_up, 30)
    for task in (away, other):
        task.cancel()
    await asyncio.wait({away, other})
