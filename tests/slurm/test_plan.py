"""Plans before a real Slurm: every golden script is accepted; estimates; submissions that are refused or get lost."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cluster import Cluster
from tests.unit.launch.slurm import test_render

GOLDEN = sorted(test_render.GOLDEN.glob("*.sh"))
SUBMIT = """
import json, os, platform, sys
from datetime import datetime
from pathlib import Path
from launch.compose import compose
from launch.errors import LaunchError
from launch.resolve import resolve
from launch.slurm import executor
from launch.slurm.shapes import jobs_of

placement, overrides = sys.argv[1], sys.argv[2:]
composed = compose([f"run_dir={os.getcwd()}/run", *overrides], []).config
config = resolve(composed, cwd=Path.cwd(), now=datetime.now(), token="abcd")
try:
    for job in jobs_of(config, placement):
        done = executor.submit(job, config, run_id="rm-test", function=platform.node)
        print(json.dumps({"job": done.job_id, "name": done.name, "script": str(done.script)}))
except LaunchError as error:
    print(json.dumps({"error": str(error), "refused": error.refused}))
"""


def submit(cluster: Cluster, placement: str, *overrides: str, path: str = "") -> list[dict[str, Any]]:
    """What alice's submissions became, through our executor and the real sbatch."""
    env = {"PATH": f"{path}:{cluster.env('alice')['PATH']}"} if path else {}
    ended = cluster.run("alice", [str(cluster.python), "-P", "-c", SUBMIT, placement, *overrides], env=env, check=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("golden", GOLDEN, ids=[path.name for path in GOLDEN])
def test_the_real_sbatch_accepts_the_golden_script(cluster: Cluster, golden: Path) -> None:
    ended = cluster.run("alice", ["sbatch", "--test-only"], stdin=golden.read_text())
    assert ended.returncode == 0, ended.stderr
    assert " to start at " in ended.stderr


def test_a_plan_estimates_every_placement_and_leaves_nothing(cluster: Cluster) -> None:
    ended = cluster.rollmill("alice", "placement=auto", "action=plan", "run_dir=planned", "cluster.partition=cpu")
    assert ended.returncode == 0, ended.stderr
    document = yaml.safe_load(ended.stdout)
    slurm = document["plan"]["slurm"]
    assert slurm["refused"] == []
    assert {name: one["starts"] for name, one in slurm["estimated_start"].items()} == {
        "het": "now", "linked": "now", "colocated": "now",
    }  # fmt: skip
    assert set(document["scripts"]) == {"het", "linked"}
    assert not (cluster.share("alice") / "planned").exists()
    assert cluster.ask("squeue", "--noheader") == ""


def test_a_plan_refuses_what_this_cluster_cannot_give(cluster: Cluster) -> None:
    """Slurm itself would say yes to some of it and let the job wait for ever."""
    overrides = ["cluster.partition=gpu", "pools.run.time_min=5000", "pools.eval.cpus_per_task=9"]
    ended = cluster.rollmill("alice", "placement=het", "action=plan", "run_dir=planned", *overrides)
    refused = yaml.safe_load(ended.stdout)["plan"]["slurm"]["refused"]
    assert any("pools.run.time_min got 5000; partition gpu allows 1440" in message for message in refused)
    assert any("pools.eval asks for 9 CPUs" in message for message in refused)
    ended = cluster.rollmill("alice", "placement=het", "action=plan", "run_dir=planned", "cluster.partition=gpu")
    (message,) = yaml.safe_load(ended.stdout)["plan"]["slurm"]["refused"]
    assert "needs 3 nodes for" in message and "there are 2" in message


def test_shapes_are_ranked_by_what_slurm_estimates(cluster: Cluster) -> None:
    shapes = "cluster.shapes=[{pools.run.nodes: 6},{pools.run.nodes: 2}]"
    ended = cluster.rollmill("alice", "placement=linked", "action=plan", "run_dir=planned", shapes)
    ranked = yaml.safe_load(ended.stdout)["plan"]["slurm"]["shapes"]
    assert [one["keys"] for one in ranked] == ["as configured", {"pools.run.nodes": 2}, {"pools.run.nodes": 6}]
    assert ranked[2]["starts"] == "never as asked"


def test_a_het_job_runs_its_function_and_is_named_in_accounting(cluster: Cluster) -> None:
    (made,) = submit(cluster, "het", "cluster.partition=cpu", "fleet.partition=gpu")
    cluster.await_state(made["job"], "COMPLETED")
    assert re.fullmatch(r"rollmill-rm-test-het-[0-9a-f]{4}", made["name"])
    queued = cluster.ask("squeue", "--states=all", "--noheader", f"--name={made['name']}", "--format=%i %k")
    assert queued.splitlines() == [f"{made['job']}+{offset} rm-test" for offset in range(5)]
    folder = Path(made["script"]).parent
    assert (folder / f"{made['job']}_0_result.pkl").exists()
    assert (folder / f"{made['job']}.out").stat().st_mode & 0o077 == 0


def test_a_refusal_carries_slurms_own_words(cluster: Cluster) -> None:
    (made,) = submit(cluster, "het", "cluster.account=nobody")
    assert made["refused"] and "Invalid account" in made["error"] and "\n" not in made["error"]
    assert cluster.ask("squeue", "--noheader") == ""


def test_parity_b20_a_submission_whose_answer_got_lost_is_found_and_not_doubled(cluster: Cluster) -> None:
    """An sbatch that submits and is then killed before it can say so."""
    place = cluster.share("alice") / "bin"
    place.mkdir(exist_ok=True)
    real = cluster.run("alice", ["sh", "-c", "command -v sbatch"], check=True).stdout.strip()
    fake = place / "sbatch"
    fake.write_text(f'#!/bin/sh\n{real} "$@" > /dev/null\nkill -9 $$\n')
    place.chmod(0o755)
    fake.chmod(0o755)
    (made,) = submit(cluster, "colocated", "cluster.partition=cpu", path=str(place))
    names = cluster.ask("squeue", "--states=all", "--noheader", f"--name={made['name']}", "--format=%i").splitlines()
    assert names == [made["job"]]


def test_sbatch_hands_memory_account_and_qos_on_to_later_components(cluster: Cluster) -> None:
    """Why checks refuse a heterogeneous job that leaves them open after a component that names them."""
    script = """\
        #!/bin/bash
        #SBATCH --nodes=1 --mem=1234M --time=7 --partition=gpu --gres=gpu:1 --hold
        #SBATCH hetjob
        #SBATCH --nodes=1
        """
    job = cluster.submit("alice", textwrap.dedent(script))
    leader, second = cluster.ask("scontrol", "show", "job", job).split("\n\n")
    assert "TresPerNode=gres" in leader and "Partition=gpu" in leader
    assert "MinMemoryNode=1234M" in second and "TimeLimit=00:07:00" in second
    assert "TresPerNode" not in second and "Partition=cpu" in second  # these are not handed on
