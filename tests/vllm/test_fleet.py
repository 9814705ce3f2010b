"""Two real replicas: what sticky sessions save, and a whole run on a fleet that the run itself starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.engine.kvcache import block_digests
from stages.shards import ShardReader
from tests.support.engine_suite import CHAT_TOKENS, PROMPT, Engine
from tests.vllm.conftest import BLOCK, PYTHON

CONVERSATIONS, TURNS = 8, 12
OBSERVED = CHAT_TOKENS.encode(
    "\n<|im_start|>user\n<tool_response>\n17\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


def converse(engines: list[Engine], *, sticky: bool) -> tuple[int, int]:
    """Grow the conversations in turn; gives the prefix tokens that hit, and those that one server would have hit."""
    for engine in engines:
        assert engine.post("/reset_prefix_cache") == {"success": True}
    before = sum(engine.metric("prefix_cache_hits_total") for engine in engines)
    streams = [[*PROMPT[:-4], *CHAT_TOKENS.encode(f"conversation {number}"), *PROMPT[-4:]] for number in range(8)]
    known: set[bytes] = set()
    optimum = 0
    for turn in range(TURNS):
        for number, stream in enumerate(streams):
            engine = engines[(number if sticky else number + turn) % len(engines)]
            digests = block_digests(stream[: len(stream) - 1], BLOCK, salt="")
            optimum += BLOCK * next((n for n, one in enumerate(digests) if one not in known), len(digests))
            answer = engine.generate(stream, max_tokens=16, temperature=0, ignore_eos=True)
            stream += answer["choices"][0]["token_ids"]
            # The last token drawn is never computed: its keys and values are not there yet.
            known.update(block_digests(stream[:-1], BLOCK, salt=""))
            stream += OBSERVED
    return int(sum(engine.metric("prefix_cache_hits_total") for engine in engines) - before), optimum


def test_sticky_sessions_hit_what_one_server_would(engines: list[Engine]) -> None:
    one, optimum = converse(engines[:1], sticky=True)
    sticky, _ = converse(engines, sticky=True)
    robin, _ = converse(engines, sticky=False)
    print(json.dumps({"optimum": optimum, "one_server": one, "sticky": sticky, "round_robin": robin}))
    assert one == optimum
    # The system prompt is the same for all: each further server computes its whole blocks once.
    shared = BLOCK * (len(PROMPT[:-4]) // BLOCK)
    assert optimum - shared <= sticky <= optimum
    assert robin < 0.9 * sticky


@pytest.mark.timeout(1000)
def test_the_demo_on_a_fleet_of_its_own(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [
        sys.executable, "-P", "-m", "launch", "experiment=demo", "fleet=vllm", "fleet.replicas=2",
        f"fleet.python={PYTHON}",
        "task.limit=16", f"run_dir={run_dir}", f"store={tmp_path / 'store'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((run_dir / "report" / "summary.json").read_text())
    assert summary["reward"]["mean"] >= 0.9
    rows = [row for group in ShardReader(run_dir).groups() for row in group.rows]
    assert len(rows) == 64
    assert {row["logprobs_mode"] for row in rows} == {"processed"}
    assert {span["version"] for row in rows for span in row["policy_versions"]} == {0}
    assert len({turn["replica"] for row in rows for turn in row["turns"]}) == 2
    assert all(len({turn["replica"] for turn in row["turns"]}) == 1 for row in rows)
