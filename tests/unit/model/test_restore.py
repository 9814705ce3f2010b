"""A model that is taken up elsewhere: the next prompt is the old stream, and a generation that was cut goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.protocols import ShellState
from stages.chat import ChatTokenizer
from stages.checkpoint import Checkpoint, StreamState
from stages.engine_client import Completion, EngineUnavailableError
from stages.errors import LLMError, ShardError
from stages.handoff import decode_checkpoint, decode_record, encode_record
from stages.model import StreamModel
from stages.trajectory import Message, Sampling, VersionSpan
from stages.wire import SessionOut
from tests.unit.stages_files.samples import make_result
from workflows.tools.bash import SCHEMA

POLICY = Path(__file__).parents[3] / "workflows" / "policies" / "tiny"
CHAT = ChatTokenizer.load(POLICY)
END = CHAT.encode("<|im_end|>")[0]


class CuttingEngine:
    """Answers what is left of a fixed answer to each turn's prompt; `cuts` are the lengths after which it aborts."""

    def __init__(self, answer: Sequence[int], cuts: Sequence[int] = (), version: int = 3) -> None:
        self._answer, self._cuts, self._version = list(answer), list(cuts), version
        self._drawn = 0
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def context_length(self, url: str) -> int:
        return 4096

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float
    ) -> Completion:
        self.prompts.append(list(token_ids))
        self.samplings.append(sampling)
        cut = self._cuts.pop(0) if self._cuts else None
        ids = self._answer[self._drawn :][: sampling.max_tokens if cut is None else cut]
        whole = self._drawn + len(ids) == len(self._answer)
        reason = "abort" if cut is not None else "stop" if whole else "length"
        self._drawn = 0 if reason != "abort" else self._drawn + len(ids)
        return Completion(ids, [-0.5] * len(ids), reason, [VersionSpan(self._version, 0, len(ids))], 4, 0.25)


def model_on(engine: object, sampling: Sampling | None = None, patience_s: float = 5.0) -> StreamModel:
    async def open_session(failed: str | None) -> SessionOut:
        return SessionOut("1", "r1", "http://r1", 3)

    return StreamModel(
        engine, open_session, CHAT, sampling or Sampling(seed=7), name="t", patience_s=patience_s  # type: ignore[arg-type]
    )  # fmt: skip


def ids_of(text: str) -> list[int]:
    return [*CHAT.encode(text), END]


CALL = ids_of('<tool_call>\n{"name": "bash", "arguments": {"command": "echo 19"}}\n</tool_call>')


def over_the_wire(state: StreamState) -> StreamState:
    """Through a record's bytes and back."""
    record = Checkpoint(
        rollout_id="g1-0", attempt=1, stream=state, shell=ShellState("/work", "A=1\n"), layers=["l1"], spent_s=2.5,
        nodes=["n1"], finished_at=1.0, layer_digest="sha256:2", layer=b"layer" * 5,
    )  # fmt: skip
    found = decode_checkpoint(encode_record(record), "here")
    assert found == record
    return found.stream


@settings(deadline=None, max_examples=25)
@given(turns=st.integers(0, 3), rest=st.integers(1, 3), tools=st.booleans())
def test_the_restored_model_goes_on_exactly_as_the_old_one_would_have(turns: int, rest: int, tools: bool) -> None:
    schemas = [SCHEMA] if tools else []

    async def talk(model: StreamModel, said: list[Message], count: int) -> None:
        for number in range(count):
            reply = await model.generate(messages=said, tools=schemas)
            said += [reply, Message("tool", f"result {number}")]

    async def scenario() -> None:
        one, two, whole = CuttingEngine(CALL), CuttingEngine(CALL), CuttingEngine(CALL)
        said, unbroken = [Message("user", "12 + 7 = ?")], [Message("user", "12 + 7 = ?")]
        first, second, third = model_on(one), model_on(two), model_on(whole)
        await talk(first, said, turns)
        second.restore(over_the_wire(first.snapshot()))
        await talk(second, said, rest)
        await talk(third, unbroken, turns)
        await talk(third, unbroken, rest)
        assert one.prompts + two.prompts == whole.prompts
        assert one.samplings + two.samplings == whole.samplings  # the same seeds, turn by turn
        (chain,) = second.trajectory().chains
        (expected,) = third.trajectory().chains
        untimed = [msgspec.structs.replace(turn, tool_s=0.0) for turn in (*chain.turns, *expected.turns)]
        assert untimed[: len(chain.turns)] == untimed[len(chain.turns) :]
        empty = {"turns": []}
        assert msgspec.structs.replace(chain, **empty) == msgspec.structs.replace(expected, **empty)
        assert second.trajectory().messages == third.trajectory().messages
        assert second.llm_s == pytest.approx(third.llm_s)

    asyncio.run(scenario())


@settings(deadline=None, max_examples=25)
@given(cuts=st.lists(st.integers(0, 6), max_size=3))
def test_a_cut_generation_is_one_turn_of_all_its_parts(cuts: list[int]) -> None:
    async def scenario() -> None:
        engine = CuttingEngine(CALL, cuts)
        model = model_on(engine)
        reply = await model.generate(messages=[Message("user", "12 + 7 = ?")])
        assert reply.tool_calls[0].arguments == {"command": "echo 19"} and reply.finish_reason == "stop"
        (chain,) = model.trajectory().chains
        (turn,) = chain.turns
        assert chain.token_ids[turn.start : turn.end] == CALL and turn.finish_reason == "stop"
        assert chain.policy_versions == [VersionSpan(3, turn.start, turn.end)]
        drawn = [len(prompt) - len(engine.prompts[0]) for prompt in engine.prompts]
        assert [prompt[len(engine.prompts[0]) :] for prompt in engine.prompts] == [CALL[:n] for n in drawn]
        assert all(s.max_tokens == 256 - n for s, n in zip(engine.samplings, drawn, strict=True))
        assert len({s.seed for s in engine.samplings}) == len(set(drawn))

    asyncio.run(scenario())


async def test_a_part_that_was_drawn_before_the_stop_is_kept_by_who_goes_on() -> None:
    class Gone(CuttingEngine):
        async def generate(self, *given: object, **named: object) -> Completion:
            if not self._cuts:
                raise EngineUnavailableError("gone")
            return await super().generate(*given, **named)  # type: ignore[arg-type]

    said = [Message("user", "12 + 7 = ?")]
    first = model_on(Gone(CALL, [5]), patience_s=0.2)
    with pytest.raises(LLMError):
        await first.generate(messages=said)
    state = over_the_wire(first.snapshot())
    assert (state.asked, state.history, first.turns, first.sampled_tokens) == (said, said, 0, 5)
    engine = CuttingEngine(CALL[5:], version=4)
    second = model_on(engine)
    second.restore(state)
    reply = await second.generate(messages=state.history)
    assert reply.tool_calls[0].arguments == {"command": "echo 19"}
    (chain,) = second.trajectory().chains
    (turn,) = chain.turns
    assert engine.prompts == [chain.token_ids[: turn.start + 5]]
    assert [(s.version, s.start - turn.start, s.end - turn.start) for s in chain.policy_versions] == [
        (3, 0, 5), (4, 5, len(CALL)),
    ]  # fmt: skip


async def test_a_turn_cut_at_its_last_token_ends_by_length() -> None:
    engine = CuttingEngine(CALL, [4])
    model = model_on(engine, Sampling(max_tokens=4))
    reply = await model.generate(messages=[Message("user", "12 + 7 = ?")])
    assert reply.finish_reason == "length" and len(engine.prompts) == 1
    assert model.trajectory().chains[0].turns[0].finish_reason == "length" and model.turns == 1


async def test_asking_again_after_a_failure_appends_nothing_twice() -> None:
    class Failing(CuttingEngine):
        broken = False

        async def generate(self, *given: object, **named: object) -> Completion:
            if self.broken:
                raise LLMError("refused")
            return await super().generate(*given, **named)  # type: ignore[arg-type]

    engine = Failing(CALL)
    model = model_on(engine)
    said = [Message("user", "12 + 7 = ?")]
    said += [await model.generate(messages=said), Message("tool", "19")]
    engine.broken = True
    with pytest.raises(LLMError):
        await model.generate(messages=said)
    engine.broken = False
    await model.generate(messages=said)
    (chain,) = model.trajectory().chains
    assert CHAT.decode(chain.token_ids).count("<tool_response>") == 1


def test_each_kind_of_record_is_read_as_itself_alone() -> None:
    with pytest.raises(ShardError, match="record kind 1 is not a checkpoint"):
        decode_checkpoint(encode_record(make_result(1, b"workspace")), "here")
    state = StreamState([], [], [], [], [], None, True, 0, 0.0, 0.0)
    record = Checkpoint(
        rollout_id="r", attempt=1, stream=state, shell=ShellState("/", ""), layers=[], spent_s=0, nodes=[],
        finished_at=0, layer_digest="sha256:0",
    )  # fmt: skip
    with pytest.raises(ShardError, match="record kind 2 is not a RUN result"):
        decode_record(encode_record(record), "here")
