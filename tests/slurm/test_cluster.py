"""The test cluster is real Slurm: what the placements build on, shown on it by jobs of an ordinary user."""

from __future__ import annotations

import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ALICE, Cluster, ClusterError, processes
from tests.support.waiting import poll

LISTENER = """#!/bin/bash
log=$1
for name in CONT TERM USR2; do trap "echo $2 $name >> $log" $name; done
echo "$2 ready $SLURMD_NODENAME ${SLURM_RESTART_COUNT:-0}" >> $log
while :; do sleep 0.1; done
"""
STEPS = """#!/bin/bash
for group in ${SLURM_HET_SIZE:+$(seq 0 $((SLURM_HET_SIZE - 1)))}; do
  srun --het-group=$group --mpi=none --kill-on-bad-exit=0 --wait=0 bash listen log step$group &
done
[ -n "$SLURM_HET_SIZE" ] || srun --ntasks=1 --mpi=none bash listen log step &
exec bash listen log batch
"""


class Heard:
    """What the listeners of one job wrote down, in order."""

    def __init__(self, cluster: Cluster, user: str = "alice") -> None:
        self.log = cluster.share(user) / "log"
        self.log.unlink(missing_ok=True)
        (cluster.share(user) / "listen").write_text(LISTENER)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def ready(self, number: int) -> None:
        poll(lambda: sum(" ready " in line for line in self.lines()) >= number, f"{number} listeners are ready")

    def of(self, who: str) -> list[str]:
        return [line.split()[1] for line in self.lines() if line.startswith(f"{who} ") and " ready " not in line]

    def restarts(self, who: str) -> list[int]:
        return [int(line.split()[3]) for line in self.lines() if line.startswith(f"{who} ready ")]


def test_a_job_runs_as_its_user_in_a_directory_of_the_users_own(cluster: Cluster) -> None:
    job = cluster.submit("alice", "#!/bin/bash\nid -un > who; umask >> who; hostname > /dev/null\n")
    cluster.await_state(job, "COMPLETED")
    who = cluster.share("alice") / "who"
    assert who.read_text().split()[0] == ALICE
    assert who.stat().st_uid == pwd.getpwnam(ALICE).pw_uid
    assert cluster.share("alice").stat().st_mode & 0o777 == 0o700
    poll(lambda: cluster.states(job) == {job: "COMPLETED", f"{job}.batch": "COMPLETED"}, "sacct knows")
    assert cluster.ask("sacct", "-nXPj", job, "-o", "User,Account,Cluster") == f"{ALICE}|physics|mill"


def test_het_job_of_five_components_has_a_node_for_each(cluster: Cluster) -> None:
    heard = Heard(cluster)
    options = ["-N1", "-c2", *[":", "-N1", "-c1"] * 4]
    job = cluster.submit("alice", STEPS, *options)
    heard.ready(6)
    assert cluster.queued(job) == {f"{job}+{number}": "RUNNING" for number in range(5)}
    nodes = {line.split()[0]: line.split()[2] for line in heard.lines()}
    assert len({nodes[f"step{number}"] for number in range(5)}) == 5
    assert nodes["batch"] == nodes["step0"]
    cluster.run("alice", ["scancel", job], check=True)
    cluster.await_state(job, "CANCELLED")
    assert set(heard.of("batch")) == {"CONT", "TERM"}
    assert all(set(heard.of(f"step{number}")) == {"CONT", "TERM"} for number in range(5))
    cluster.await_no_processes()


def test_what_escapes_from_a_job_is_of_no_later_test(cluster: Cluster) -> None:
    job = cluster.submit("alice", "#!/bin/bash\n(setsid sleep 600 > /dev/null 2>&1 &)\n")
    cluster.await_state(job, "COMPLETED")
    assert cluster.job_processes(), "Slurm follows parents here, and this one's is gone"
    cluster.settle()
    cluster.await_no_processes(10)


def test_usr2_reaches_either_the_steps_or_the_batch_shell(cluster: Cluster) -> None:
    heard = Heard(cluster)
    job = cluster.submit("alice", STEPS)
    heard.ready(2)
    cluster.run("alice", ["scancel", "--signal=USR2", "--batch", job], check=True)
    poll(lambda: heard.of("batch") == ["USR2"], "the batch shell has it")
    assert heard.of("step") == []
    cluster.run("alice", ["scancel", "--signal=USR2", job], check=True)
    poll(lambda: "USR2" in heard.of("step"), "the step has it")
    assert heard.of("batch") == ["USR2"]


@pytest.mark.root
def test_calls_are_counted_by_user(cluster: Cluster) -> None:
    cluster.reset_rpcs()
    cluster.run("alice", ["scontrol", "show", "partition", "cpu"], check=True)
    calls = cluster.rpcs()
    assert calls.users[ALICE] == calls.kinds["REQUEST_PARTITION_INFO"] == 1
    assert "bob" not in calls.users


def test_knobs_change_while_it_runs(cluster: Cluster) -> None:
    with cluster.changed(min_job_age_s=2, bf_interval_s=7):
        shown = cluster.ask("scontrol", "show", "config")
        assert "bf_interval=7" in shown and "MinJobAge               = 2 sec" in shown
    assert "bf_interval=1," in cluster.ask("scontrol", "show", "config")
    with pytest.raises(ClusterError, match="cannot change while it runs"), cluster.changed(cpu_nodes=1):
        pass


def test_a_gpu_job_sees_its_devices(cluster: Cluster) -> None:
    job = cluster.submit("bob", "#!/bin/bash\necho $CUDA_VISIBLE_DEVICES > devices\n", "-pgpu", "--gpus-per-node=2")
    cluster.await_state(job, "COMPLETED")
    assert (cluster.share("bob") / "devices").read_text().split() == ["0,1"]


@pytest.mark.root
def test_the_real_command_line_runs_as_an_ordinary_user(cluster: Cluster) -> None:
    ended = cluster.rollmill("alice", "--version")
    assert ended.returncode == 0 and ended.stdout.startswith("rollmill "), ended.stderr
    where = "import launch, os; print(launch.__file__, os.access(launch.__file__, os.W_OK))"
    path, writable = cluster.run("bob", [str(cluster.python), "-c", where], check=True).stdout.split()
    assert Path(path).is_relative_to(cluster.places.root)
    assert writable == "False"


def test_what_a_killed_session_left_is_ended_by_the_next(cluster: Cluster) -> None:
    script = """
import os, pathlib, sys
from tests.support.cluster import Cluster, ClusterSpec
Cluster(ClusterSpec(cpu_nodes=1, gpu_nodes=0, accounting=False), root=pathlib.Path(sys.argv[1])).up()
os.kill(os.getpid(), 9)
"""
    root = cluster.places.root.with_name("killed")
    ended = subprocess.run([sys.executable, "-c", script, str(root)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    left = Cluster(root=root)
    names = {processes.name(pid) for pid in processes.of_cluster(left.places.conf)}
    assert names >= {"munged", "slurmctld", "slurmd"}
    left.down()
    assert processes.of_cluster(left.places.conf) == {}
    assert not root.exists()
