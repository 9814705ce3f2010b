"""Two real replicas: what sticky sessions save, and whole runs whose rows are recomputed token by token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stages.engine.kvcache import block_digests
from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import SamplingParams, token_logprobs
from stages.layout import RunLayout
from stages.shards import ShardReader
from tests.support import runs
from tests.support.engine_suite import CHAT_TOKENS, PROMPT, TINY, Engine
from tests.vllm.conftest import BLOCK

CONVERSATIONS, TURNS, ANSWER = 8, 12, 16
OBSERVED = CHAT_TOKENS.encode(
    "\n<|im_start|>user\n<tool_response>\n17\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


def converse(engines: list[Engine], *, sticky: bool) -> tuple[int, int]:
    """Grow the conversations turn by turn; gives the prefix tokens that hit, and those that one server would have hit.

    The first turns go one after the other: what all conversations share is cached before they are asked for at once.
    """
    for engine in engines:
        assert engine.post("/reset_prefix_cache") == {"success": True}
    before = sum(engine.metric("prefix_cache_hits_total") for engine in engines)
    streams = [
        [*PROMPT[:-4], *CHAT_TOKENS.encode(f"conversation {number}"), *PROMPT[-4:]] for number in range(CONVERSATIONS)
    ]
    known: set[bytes] = set()
    optimum = 0
    for turn in range(TURNS):

        def ask(number: int, turn: int = turn) -> list[int]:
            engine = engines[(number if sticky else number + turn) % len(engines)]
            answer = engine.generate(streams[number], max_tokens=ANSWER, temperature=0, ignore_eos=True)
            ids: list[int] = answer["choices"][0]["token_ids"]
            return ids

        with ThreadPoolExecutor(CONVERSATIONS if turn else 1) as pool:
            answers = list(pool.map(ask, range(CONVERSATIONS)))
        for stream, answer in zip(streams, answers, strict=True):
            digests = block_digests(stream[: len(stream) - 1], BLOCK, salt="")
            optimum += BLOCK * next((n for n, one in enumerate(digests) if one not in known), len(digests))
            stream += answer
            # The last token drawn is never computed: its keys and values are not there yet.
            known.update(block_digests(stream[:-1], BLOCK, salt=""))
            stream += OBSERVED
    return int(sum(engine.metric("prefix_cache_hits_total") for engine in engines) - before), optimum


def test_sticky_sessions_hit_what_one_server_would(engines: list[Engine], tell: Callable[..., None]) -> None:
    one, optimum = converse(engines[:1], sticky=True)
    sticky, _ = converse(engines, sticky=True)
    robin, _ = converse(engines, sticky=False)
    tell(optimum=optimum, one_server=one, sticky=sticky, round_robin=robin)
    assert one == optimum
    # The system prompt is the same for all: each further server computes its whole blocks once.
    shared = BLOCK * (len(PROMPT[:-4]) // BLOCK)
    assert optimum - shared <= sticky <= optimum
    assert robin < 0.9 * sticky


def far_off(row: dict[str, Any], model: Qwen3, params: SamplingParams) -> float:
    """The largest difference of a row's recorded log-probs to those of the model over its whole stream."""
    logits = model.logits(row["token_ids"])[:-1]
    again = token_logprobs(logits, row["token_ids"][1:], params)
    sampled = [n for n, drawn in enumerate(row["loss_mask"]) if drawn]
    return max(abs(row["logprobs"][n] - float(again[n - 1])) for n in sampled)


def test_the_demo_on_both_with_exact_rows(engines: list[Engine], tmp_path: Path, tell: Callable[..., None]) -> None:
    for engine in engines:
        assert engine.post("/update_weight_version", {"new_version": "0"})["success"]
    run_dir = tmp_path / "run"
    key = RunLayout(run_dir).engine_token
    key.parent.mkdir(parents=True)
    key.write_text(engines[0].key)
    done = runs.run(
        run_dir, "fleet=external", "fleet.model=tiny", f"fleet.urls=[{','.join(engine.url for engine in engines)}]",
        "task.limit=16",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with ShardReader(run_dir) as reader:
        rows = [row for group in reader.groups() for row in group.rows]
    assert len(rows) == 64 and runs.summary(run_dir)["reward"]["mean"] >= 0.9
    assert {row["logprobs_mode"] for row in rows} == {"processed"}
    assert {span["version"] for row in rows for span in row["policy_versions"]} == {0}
    assert len({turn["replica"] for row in rows for turn in row["turns"]}) == 2
    assert all(len({turn["replica"] for turn in row["turns"]}) == 1 for row in rows)
    model = Qwen3.load(TINY)
    gaps = [far_off(row, model, SamplingParams()) for row in rows]
    tell(reward=runs.summary(run_dir)["reward"]["mean"], gap_max=max(gaps))
    assert max(gaps) < 1e-4
