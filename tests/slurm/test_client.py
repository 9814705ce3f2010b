"""The Slurm client on a real cluster: one contract for both backends, and what the commands say."""

from __future__ import annotations

import importlib.util
import os
import time

import pytest

from launch.slurm.client.commands import CommandClient
from launch.slurm.client.errors import SlurmRefused, SlurmUnavailable
from launch.slurm.client.protocol import JobInfo, SlurmClient
from launch.slurm.client.pyslurm_backend import PyslurmClient
from launch.slurm.client.runner import CommandRunner
from launch.slurm.client.states import JobState
from launch.slurm.client.verdict import half_dead
from launch.slurm.words import explain
from tests.support.cluster import ALICE, Cluster
from tests.support.waiting import eventually

PLAIN = "#!/bin/bash\nexec sleep 600\n"
HET = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --mem=100
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --mem=100 --partition=gpu --gpus-per-node=1
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks=2 --mem=100
srun --het-group=0-2 sleep 600
"""
NAME = "rollmill-client-test"
COMMENT = "run,of|a = test"


def commands(cluster: Cluster, user: str = "alice", *clusters: str) -> CommandClient:
    return CommandClient(clusters, CommandRunner(environment=cluster.env(user)))


@pytest.fixture(params=["commands", "pyslurm"])
def client(request: pytest.FixtureRequest, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    monkeypatch.setenv("SLURM_CONF", str(cluster.places.conf))
    monkeypatch.setenv("PATH", f"{cluster.binaries.path}:{os.environ['PATH']}")
    if request.param == "commands":
        return commands(cluster)
    if importlib.util.find_spec("pyslurm") is None:
        pytest.skip("pyslurm is not installed: it must be built against the very libslurm of this site")
    return PyslurmClient()


async def states(client: SlurmClient, job: str, since: float | None = None) -> dict[str, JobInfo]:
    return {one.job_id: one for one in await client.jobs([job], user=ALICE, since=since)}


async def until(client: SlurmClient, job: str, *wanted: JobState, timeout_s: float = 60) -> dict[str, JobInfo]:
    """The job's components once all of them are in one of these states."""

    async def there() -> dict[str, JobInfo]:
        found = await states(client, job)
        return found if found and {one.state for one in found.values()} <= set(wanted) else {}

    return await eventually(there, f"job {job} is {' or '.join(wanted)}", timeout_s)


# ---- the contract of both backends


async def test_a_het_jobs_components(cluster: Cluster, client: SlurmClient) -> None:
    job = cluster.submit("alice", HET, f"--job-name={NAME}", f"--comment={COMMENT}", "--time=5")
    found = await until(client, job, JobState.RUNNING)
    assert sorted(found) == [f"{job}+{offset}" for offset in range(3)]
    for offset, part in enumerate(found[f"{job}+{n}"] for n in range(3)):
        assert (part.leader_id, part.het_offset, part.name, part.comment) == (job, offset, NAME, COMMENT)
        assert (part.user, part.account, part.time_limit_min, part.restarts) == (ALICE, "physics", 5, 0)
        assert part.started_at is not None
        assert part.ended_at is not None
        assert abs(part.started_at - time.time()) < 120, "times are the machine's own, whatever its zone"
        assert part.ended_at - part.started_at == 300, "when the limit will end it"
        assert (part.reason, part.estimated_start) == (None, None)
    assert (found[f"{job}+1"].gpus, found[f"{job}+1"].partition) == (1, "gpu")
    assert (found[f"{job}+2"].node_count, len(found[f"{job}+2"].nodes)) == (2, 2)
    assert {one.job_id for one in await client.jobs(name=NAME, user=ALICE)} == set(found)
    await client.cancel([job])
    ended = await until(client, job, JobState.CANCELLED)
    assert set(ended) == set(found)
    await client.cancel([job])


async def test_a_plain_jobs_life(cluster: Cluster, client: SlurmClient) -> None:
    held = cluster.submit("alice", PLAIN, "--hold")
    mark = cluster.share("alice") / "trap-is-set"
    job = cluster.submit("alice", f"#!/bin/bash\ntrap 'kill $!; exit 3' USR2\ntouch {mark}\nsleep 600 & wait\n")
    waiting = (await until(client, held, JobState.PENDING))[held]
    assert (waiting.reason, waiting.nodes, waiting.het_offset, waiting.leader_id) == ("JobHeldUser", (), None, held)
    await until(client, job, JobState.RUNNING)
    both = await client.jobs([held, job], user=ALICE)
    assert {one.job_id for one in both} == {held, job}
    await eventually(mark.exists, "its script runs", 60)
    await client.requeue(job)
    mark.unlink()
    await eventually(mark.exists, "its script runs again", 60)
    again = await until(client, job, JobState.RUNNING)
    await client.signal(job, "USR2", batch_only=True)
    failed = await until(client, job, JobState.FAILED)
    assert (again[job].restarts, failed[job].exit_code, failed[job].restarts) == (1, 3, 1)
    await client.cancel([held], pending_only=True)
    await until(client, held, JobState.CANCELLED)


async def test_what_is_not_there(cluster: Cluster, client: SlurmClient) -> None:
    assert await client.jobs(["999999"], user=ALICE) == []
    assert await client.jobs(name="rollmill-nobody", user=ALICE) == []
    await client.cancel(["999999"])
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        await client.requeue("999999")


# ---- what the commands alone answer


async def test_the_site_and_a_users_share(cluster: Cluster) -> None:
    client = commands(cluster)
    site = await client.site()
    assert site.version[:2] == cluster.version
    assert (site.accounting, site.bf_interval_s, site.kill_wait_s) == (
        True,
        cluster.spec.bf_interval_s,
        cluster.spec.kill_wait_s,
    )
    assert site.signals_preempted
    assert {node.name for node in site.nodes} == set(cluster.spec.nodes)
    cpu, gpu, preempt = site.partition(None), site.partition("gpu"), site.partition("preempt")
    assert cpu is not None
    assert gpu is not None
    assert preempt is not None
    assert (cpu.name, cpu.cpus, cpu.mem_mib, cpu.gpus) == ("cpu", cluster.spec.cpus, cluster.spec.memory_mib, 0)
    assert (gpu.gpus, len(gpu.nodes)) == (cluster.spec.gpus, cluster.spec.gpu_nodes)
    assert (preempt.preempt_mode, preempt.grace_time_s) == ("REQUEUE", cluster.spec.grace_s)
    assert site.preempt_type == "preempt/partition_prio"
    share = await client.fair_share(ALICE)
    assert share is not None
    assert (share.user, share.account) == (ALICE, "physics")
    assert share.factor is not None
    assert 0 <= share.factor <= 1
    assert await client.fair_share("nobody-of-that-name") is None


async def test_a_waiting_job_is_explained(cluster: Cluster) -> None:
    client = commands(cluster)
    full = cluster.submit("alice", PLAIN, "--nodes=5", "--exclusive", "--time=10")
    await until(client, full, JobState.RUNNING)
    waits = cluster.submit("alice", PLAIN, "--nodes=2", "--exclusive", "--time=120")

    async def looked_at() -> JobInfo | None:
        found = (await states(client, waits))[waits]
        return found if found.reason in {"Resources", "Priority"} and found.estimated_start else None

    job = await eventually(looked_at, "the scheduler has looked at it", 60)
    assert job is not None
    lines = explain(
        [job], await client.site(), await client.fair_share(ALICE), components={waits: "run"}, now=time.time()
    )
    text = "\n".join(lines)
    assert f"run ({waits}) waits: {job.reason}" in text
    assert "estimated start in" in text
    assert "fair-share factor" in text
    assert "partition gpu has 2 idle nodes: cluster.partition=gpu" in text
    assert "a time limit below 120 min" in text


async def test_parity_b20_a_job_that_the_controller_has_forgotten(cluster: Cluster) -> None:
    client, began = commands(cluster), time.time()
    job = cluster.submit("alice", "#!/bin/bash\nexit 4\n")
    await until(client, job, JobState.FAILED)

    class Forgetful(CommandRunner):
        """The controller after MinJobAge: it does not know the job any more."""

        async def run(self, argv, *, changes=False):  # type: ignore[no-untyped-def]
            if argv[0] in {"squeue", "scontrol"}:
                argv = [word.replace(job, "999999") if word in {job, f"--jobs={job}"} else word for word in argv]
            return await super().run(argv, changes=changes)

    forgetful = CommandClient(runner=Forgetful(environment=cluster.env("alice")))

    async def found() -> JobInfo | None:
        jobs = await states(forgetful, job, began)
        return jobs.get(job) if jobs and jobs[job].state.ended and jobs[job].exit_code else None

    one = await eventually(found, "accounting has the job's end", 30)
    assert one is not None
    assert (one.state, one.exit_code, one.source, one.restarts) == (JobState.FAILED, 4, "sacct", 0)


async def test_parity_b23_a_preempted_job_is_the_same_job_one_attempt_later(cluster: Cluster) -> None:
    client, began = commands(cluster), time.time()
    low = cluster.submit("alice", PLAIN, "--partition=preempt", "--nodelist=cpu1", "--exclusive", "--requeue")
    await until(client, low, JobState.RUNNING)
    high = cluster.submit("bob", PLAIN, "--partition=cpu", "--nodelist=cpu1", "--exclusive")

    async def again() -> JobInfo | None:
        found = (await states(client, low)).get(low)
        return found if found is not None and found.restarts == 1 and not found.state.holds_nodes else None

    waiting = await eventually(again, "it waits again", 60)
    assert waiting is not None
    assert not waiting.state.ended
    await commands(cluster, "bob").cancel([high])
    back = (await until(client, low, JobState.RUNNING, timeout_s=60))[low]
    assert (back.leader_id, back.restarts) == (low, 1)
    usages = await client.accounting([low], began)
    assert usages is not None
    assert len(usages) == 2
    assert usages[0].state in {JobState.PREEMPTED, JobState.REQUEUED}


async def test_half_a_heterogeneous_job_is_recognised(cluster: Cluster) -> None:
    client = commands(cluster)
    job = cluster.submit("alice", f"{HET}exec sleep 600\n")  # the job outlives its step
    await until(client, job, JobState.RUNNING)
    assert half_dead(list((await states(client, job)).values())) == []
    await client.cancel([f"{job}+1"])

    async def broken() -> list[str]:
        return half_dead(list((await states(client, job)).values()))

    assert await eventually(broken, "one component is gone") == [job]


async def test_accounting_of_a_het_job(cluster: Cluster) -> None:
    client, began = commands(cluster), time.time()
    job = cluster.submit("alice", HET.replace("sleep 600", "bash -c 'for i in {1..200000}; do :; done; sleep 2'"))
    await until(client, job, JobState.COMPLETED, timeout_s=90)

    async def complete() -> bool:
        usages = await client.accounting([job], began) or []
        done = [one.job_id for one in usages if one.state is JobState.COMPLETED and one.cpu_s is not None]
        return sorted(done) == [f"{job}+{offset}" for offset in range(3)]

    await eventually(complete, "accounting has every component once", 30)  # slurmdbd hears of them one by one
    usages = {one.job_id: one for one in await client.accounting([job], began) or []}
    assert (usages[f"{job}+1"].gpus, usages[f"{job}+2"].cpus) == (1, 2)
    assert all(one.elapsed_s >= 2 for one in usages.values())


async def test_parity_b25_a_named_cluster(cluster: Cluster) -> None:
    name = (await commands(cluster).site()).cluster
    client = commands(cluster, "alice", name)
    job = cluster.submit("alice", PLAIN)
    assert (await until(client, job, JobState.RUNNING))[job].cluster == name
    assert (await client.site()).cluster == name
    share = await client.fair_share(ALICE)
    assert share is not None
    assert share.account == "physics"
    await client.cancel([job])
    await until(client, job, JobState.CANCELLED)


async def test_what_a_question_costs_the_controller(cluster: Cluster) -> None:
    client = commands(cluster)
    jobs = [cluster.submit("alice", PLAIN, "--hold") for _ in range(3)]
    cluster.reset_rpcs()
    for _ in range(5):
        assert len(await client.jobs(jobs, user=ALICE)) == 3
    kinds = {name: count for name, count in cluster.rpcs().kinds.items() if name != "REQUEST_STATS_INFO"}
    assert kinds.pop("REQUEST_JOB_USER_INFO") == 5, "one user's jobs, however many ids"
    assert kinds.pop("REQUEST_PARTITION_INFO", 0) <= 5
    assert not [name for name in kinds if "JOB" in name or "FED" in name]


async def test_a_controller_that_is_not_there(cluster: Cluster) -> None:
    environment = {**cluster.env("alice"), "SLURM_CONF": "/nowhere/slurm.conf"}
    client = CommandClient(runner=CommandRunner(2.0, environment))
    with pytest.raises(SlurmUnavailable):
        await client.jobs(["1"])
