"""The ledger's benchmark runs, small, and prints what was agreed; its own checks (nothing acknowledged lost) hold."""

from __future__ import annotations

import json
import subprocess
import sys

KEYS = {"acked_events_per_s", "reopen_1m_s", "reopen_rss_mib", "rollouts_per_s", "router_cpu_ms_per_rollout"}


def test_the_ledgers_benchmark_runs_small_and_finds_everything_that_was_acknowledged() -> None:
    command = [sys.executable, "-P", "-m", "tests.bench.ledger", "--json", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["bench"] == "ledger" and report["errors"] == []
    assert report["results"].keys() >= KEYS
    assert report["results"]["bytes_per_event"] >= 200
    assert report["results"]["reopen_events"] >= 2000
