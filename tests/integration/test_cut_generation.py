"""A replica that leaves in the middle of a turn: what it drew is kept, another one draws the rest, exactly."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
from safetensors.numpy import load_file, save_file

from stages.chat import ChatTokenizer
from stages.engine_client import EngineClient
from stages.model import StreamModel
from stages.trajectory import Message, Sampling, VersionSpan
from stages.wire import SessionOut
from tests.support.engine_process import EngineProcess, metric, running_engine
from tests.support.tiny_qwen import tiny_config, write_model
from tests.support.waiting import eventually

TOKENS = 1500


def endless(model_dir: Path) -> Path:
    """The model without a reason to end its turn: the logits of the ids that end it are 0, and the highest is above."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[head][sorted(ChatTokenizer.load(model_dir).eos_ids)] = 0.0
    save_file(tensors, path)
    return model_dir


async def test_a_turn_begun_on_one_replica_is_ended_on_another(tmp_path: Path) -> None:
    model_dir = endless(write_model(tmp_path / "model", tiny_config(max_len=2048)))
    with (
        running_engine(model_dir, tmp_path / "one", "--weight-version", "1") as one,
        running_engine(model_dir, tmp_path / "two", "--weight-version", "2") as two,
    ):
        engines: list[EngineProcess] = [one, two]
        opened: list[str | None] = []

        async def open_session(failed: str | None) -> SessionOut:
            opened.append(failed)
            number = min(len(opened), 2)
            return SessionOut(str(number), f"r{number}", engines[number - 1].url, 0)

        async with EngineClient() as client:
            # Near-greedy: the end of the turn is never drawn, and the whole can be recomputed.
            sampling = Sampling(temperature=1e-4, max_tokens=TOKENS)
            model = StreamModel(client, open_session, ChatTokenizer.load(model_dir), sampling, name="t")
            asked = asyncio.create_task(model.generate(messages=[Message("user", "12 + 7 = ?")]))
            with httpx.Client(base_url=one.url) as watcher:
                await eventually(lambda: asked.done() or metric(watcher, "num_requests_running") == 1, "it draws")
            assert not asked.done()
            one.process.send_signal(signal.SIGTERM)
            reply = await asyncio.wait_for(asked, 60)
            (chain,) = model.trajectory().chains
            (turn,) = chain.turns
            whole = await client.generate(
                two.url, chain.token_ids[: turn.start], sampling, name="whole", timeout_s=60
            )  # fmt: skip
    assert opened == [None, "r1"] and turn.replica == "r2"
    assert reply.finish_reason == turn.finish_reason == whole.finish_reason
    assert chain.token_ids[turn.start : turn.end] == whole.token_ids
    first, second = chain.policy_versions
    assert (first.version, first.start, second.version, second.end) == (1, turn.start, 2, turn.end)
    assert first.end == second.start and isinstance(first, VersionSpan)
