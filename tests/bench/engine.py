"""Tokens a second of the embedded engine through HTTP, against a bare decode loop over the same forward pass.

The bare loop has no scheduler, no requests, no log-probs and no HTTP: it decodes and draws from the softmax. Both run
in the same minutes on the same cores, in turns, and each figure is the median of its turns, so that a noisy neighbour
hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.bench.report import emit
from tests.support.engine_process import running_engine
from tests.support.tiny_qwen import tiny_config, write_model

STREAMS = (1, 16)
PROMPT_TOKENS = 64
VOCAB = 1024

_BARE = """
import sys, time
from pathlib import Path
import stages.engine
import numpy as np
from stages.engine.qwen3 import Qwen3
model = Qwen3.load(Path(sys.argv[1]))
rng = np.random.default_rng(0)
for line in sys.stdin:
    batch, steps, prompt = map(int, line.split())
    rows = model.new_rows(batch, prompt + steps)
    began = time.perf_counter()
    for row in range(batch):
        logits = model.prefill(rng.integers(0, 1000, prompt), 0, rows, row)
    tokens = np.zeros(batch, dtype=np.int64)
    for step in range(steps):
        logits = model.decode(tokens, np.full(batch, prompt + step), rows, slice(0, batch))
        weights = np.exp(logits - logits.max(axis=1, keepdims=True)).cumsum(axis=1)
        tokens = np.array([w.searchsorted(rng.random() * w[-1]) for w in weights]).clip(max=logits.shape[1] - 1)
    print(batch * steps / (time.perf_counter() - began), flush=True)
"""


def _bare(process: subprocess.Popen[str], batch: int, steps: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{batch} {steps} {PROMPT_TOKENS}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


async def _streams(url: str, streams: int, steps: int, turn: int) -> float:
    """Tokens a second of `streams` requests at once, each with a prompt of its own."""
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        await asyncio.gather(*(client.get("/health") for _ in range(streams)))

        async def one(stream: int) -> int:
            prompt = [(turn * 7919 + stream * 104729 + index * 31) % (VOCAB - 3) + 3 for index in range(PROMPT_TOKENS)]
            sampling = {"max_tokens": steps, "temperature": 1.0, "seed": stream, "logprobs": 0, "ignore_eos": True}
            answer = await client.post(
                "/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling}
            )
            return len(answer.raise_for_status().json()["choices"][0]["token_ids"])

        began = time.perf_counter()
        counts = await asyncio.gather(*(one(stream) for stream in range(streams)))
        return sum(counts) / (time.perf_counter() - began)


def _first_answer_s(model: Path, scratch: Path) -> float:
    """Seconds from the start of the process to its first generated token."""
    with running_engine(model, scratch) as engine, httpx.Client(base_url=engine.url) as client:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1}}
        client.post("/inference/v1/generate", json=body).raise_for_status()
        return time.monotonic() - engine.started_at


def _measure(model: Path, scratch: Path, steps: int, turns: int) -> dict[str, float]:
    figures: dict[str, list[float]] = {}
    bare = subprocess.Popen(
        [sys.executable, "-c", _BARE, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with bare, running_engine(model, scratch / "engine") as engine:
        for turn in range(turns + 1):
            for streams in STREAMS:
                taken = {
                    f"bare{streams}_tokens_per_s": _bare(bare, streams, steps),
                    f"stream{streams}_tokens_per_s": asyncio.run(_streams(engine.url, streams, steps, turn)),
                }
                # The first turn only warms up caches and connections.
                for key, value in taken.items() if turn else ():
                    figures.setdefault(key, []).append(value)
        bare.communicate(timeout=30)
    firsts = [_first_answer_s(model, scratch / f"first{turn}") for turn in range(3)]
    return {key: statistics.median(values) for key, values in figures.items()} | {
        "first_answer_s": statistics.median(firsts)
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of a table")
    parser.add_argument("--quick", action="store_true", help="few tokens and turns")
    parser.add_argument(
        "--model", type=Path, default=None, help="model directory; a random one of the usual size by default"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or write_model(
            Path(scratch) / "model",
            tiny_config(
                vocab=VOCAB, hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=384, max_len=4096
            ),
        )
        steps, turns = (128, 2) if arguments.quick else (256, 5)
        results = _measure(model, Path(scratch), steps, turns)
    ratios = {
        f"stream{streams}_x_bare": results[f"stream{streams}_tokens_per_s"] / results[f"bare{streams}_tokens_per_s"]
        for streams in STREAMS
    }
    return emit("engine", results, ratios=ratios, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
