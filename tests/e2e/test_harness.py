"""agent=harness by the real command: a foreign client's rollouts leave rows with the engine's own tokens."""

from __future__ import annotations

import math
from pathlib import Path

from stages.shards import ShardReader
from tests.integration.test_gateway_harness import COMMAND
from tests.support.runs import run


def test_a_foreign_client_leaves_token_exact_rows(tmp_path: Path) -> None:
    overrides = tmp_path / "conf" / "agent"
    overrides.mkdir(parents=True)
    indented = "".join(f"    {line}\n" for line in COMMAND.splitlines())
    (overrides / "mine.yaml").write_text(
        "_target_: workflows.agents.harness.HarnessAgent\nname: harness\nharness: command\n"
        f"options:\n  command: |\n{indented}"
    )
    done = run(
        tmp_path / "run", "agent=mine", f"--config-dir={tmp_path / 'conf'}", "task.limit=2", "group_size=2",
        "sampling.temperature=1.0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(ShardReader(tmp_path / "run"))
    assert len(rows) == 4 and {row["status"] for row in rows} == {"completed"}
    for row in rows:
        mask, logprobs = row["loss_mask"], row["logprobs"]
        assert row["agent"] == "harness" and row["turns"]
        assert len(row["token_ids"]) == len(mask) == len(logprobs)
        assert all((value < 0 or math.isclose(value, 0, abs_tol=1e-3)) for value in logprobs)
        assert all(value == 0 for value, sampled in zip(logprobs, mask, strict=True) if not sampled)
        assert sum(mask) == sum(turn["end"] - turn["start"] for turn in row["turns"]) > 0
        assert {span["version"] for span in row["policy_versions"]} == {0}
        assert sum(span["end"] - span["start"] for span in row["policy_versions"]) == sum(mask)
