"""What real commands printed, read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.slurm.client import json_shapes, sacct, scontrol, squeue
from launch.slurm.client.commands import parse_shares
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.states import JobState
from tests.unit.launch.slurm.client.slurms import recorded

SUBMITTED = 1795289272


def by_id(jobs: list[JobInfo]) -> dict[str, JobInfo]:
    return {job.job_id: job for job in jobs}


def test_squeues_columns() -> None:
    jobs = by_id(squeue.parse(recorded("squeue-22.05.txt")))
    assert set(jobs) == {"11+0", "11+1", "11+2", "14", "15", "16", "17", "18", "19", "20+0", "20+1", "20+2"}
    assert jobs["11+1"] == JobInfo(
        job_id="11+1", leader_id="11", het_offset=1, name="rollmill-x-het-abcd", user="alice", account="physics",
        partition="gpu", qos="normal", cluster="ci", comment="rm-x", state=JobState.RUNNING, nodes=("gpu1",),
        node_count=1, cpus=1, gpus=1, submitted_at=SUBMITTED, eligible_at=SUBMITTED, started_at=SUBMITTED,
        ended_at=SUBMITTED + 300, time_limit_min=5, priority=4341, source="squeue",
    )  # fmt: skip
    assert jobs["11+2"].nodes == ("cpu1", "cpu2")
    failed = jobs["14"]
    assert (failed.state, failed.reason, failed.exit_code, failed.exit_signal) == ("failed", "NonZeroExitCode", 3, 0)
    assert failed.comment == "a,b|c=d e"
    held = jobs["16"]
    assert (held.state, held.reason, held.priority, held.estimated_start) == ("pending", "JobHeldUser", 0, None)
    waits = jobs["19"]
    assert (waits.reason, waits.node_count, waits.estimated_start) == ("Resources", 5, 1795289574)
    assert (waits.started_at, waits.ended_at, waits.nodes) == (None, None, ())
    assert jobs["17"].time_limit_min == 3065


def test_columns_that_do_not_fit_are_noticed() -> None:
    text = recorded("squeue-22.05.txt")
    with pytest.raises(squeue.UnreadableError, match="24"):
        squeue.parse(text.replace("a,b|c=d e", "two\nlines"))
    assert squeue.parse("CLUSTER: ci\n\n" + text) == squeue.parse(text)
    assert squeue.parse("") == []


def test_json_of_2205_says_the_same_as_the_columns() -> None:
    columns = by_id(squeue.parse(recorded("squeue-22.05.txt")))
    found = by_id(json_shapes.parse(recorded("squeue-22.05.json")))
    assert set(found) == {"11+0", "11+1", "11+2", "14", "15", "19"}
    assert found == {name: columns[name] for name in found}


def test_2411_says_the_same_in_columns_and_json() -> None:
    columns = by_id(squeue.parse(recorded("squeue-24.11.txt")))
    found = by_id(json_shapes.parse(recorded("squeue-24.11.json")))
    assert set(found) == {"1+0", "1+1", "4", "6", "7"}
    assert found == {name: columns[name] for name in found}
    failed, held, waits = found["4"], found["6"], found["7"]
    assert (failed.state, failed.exit_code, failed.exit_signal, failed.comment) == ("failed", 3, 0, "a,b|c=d e")
    assert (held.reason, held.time_limit_min, held.estimated_start, held.priority) == ("JobHeldUser", 3065, None, 0)
    assert (waits.reason, waits.state, waits.node_count) == ("Resources", "pending", 5)
    assert waits.estimated_start is not None


def test_jsons_own_words_for_nothing() -> None:
    job = json.loads(recorded("squeue-24.11.json"))["jobs"][0]
    unset: dict[str, Any] = {"set": False, "infinite": False, "number": 0}
    job |= {"time_limit": {"set": False, "infinite": True, "number": 0}, "priority": unset, "het_job_id": unset}
    job |= {"job_state": ["CANCELLED", "COMPLETING"], "start_time": unset, "exit_code": {"set": True, "number": 15}}
    (read,) = json_shapes.parse(json.dumps({"jobs": [job]}))
    assert (read.time_limit_min, read.priority, read.het_offset) == (None, None, None)
    assert read.job_id == str(job["job_id"])
    assert (read.state, read.started_at, read.exit_signal) == (JobState.COMPLETING, None, 15)
    job["exit_code"] = {"return_code": unset, "signal": {"id": {"set": True, "infinite": False, "number": 9}}}
    (read,) = json_shapes.parse(json.dumps({"jobs": [job]}))
    assert (read.exit_code, read.exit_signal) == (0, 9)


def test_json_is_filtered_here_for_2205_prints_the_whole_queue() -> None:
    text = recorded("squeue-22.05.json")
    assert {job.job_id for job in json_shapes.parse(text, ids=["11"])} == {"11+0", "11+1", "11+2"}
    assert {job.job_id for job in json_shapes.parse(text, name="ex")} == {"14"}
    assert json_shapes.parse(text, user="bob") == []
    for wrong in ("", "[]", '{"jobs": [{}]}', '{"jobs": 3}', "slurm_load_jobs error"):
        with pytest.raises(squeue.UnreadableError):
            json_shapes.parse(wrong)


def test_saccts_jobs_with_their_attempts() -> None:
    jobs = by_id(sacct.parse_jobs(recorded("sacct-22.05.txt")))
    assert set(jobs) == {"1+0", "1+1", "1+2", "4", "8", "11+0", "11+1", "11+2"}
    assert {jobs[f"1+{offset}"].restarts for offset in range(3)} == {1}
    assert (jobs["1+1"].state, jobs["1+1"].gpus, jobs["1+1"].leader_id) == (JobState.COMPLETED, 1, "1")
    assert (jobs["4"].state, jobs["4"].restarts) == (JobState.CANCELLED, 0)
    assert (jobs["8"].state, jobs["8"].exit_code) == (JobState.FAILED, 3)
    assert (jobs["11+0"].state, jobs["11+0"].ended_at) == (JobState.RUNNING, None)


def test_saccts_usage() -> None:
    usages = sacct.parse_usage(recorded("sacct-usage-22.05.txt"))
    assert [usage.job_id for usage in usages] == ["1+0", "1+1", "1+2", "4", "1+0", "1+1", "1+2", "8"]
    second = usages[4]
    assert (second.state, second.elapsed_s, second.cpus, second.gpus) == (JobState.COMPLETED, 60, 1, 0)
    assert second.cpu_s == pytest.approx(0.027)
    assert [step.step for step in second.steps] == ["batch", "0"]
    assert usages[5].gpus == 1


def test_a_running_steps_cpu_time_is_not_known() -> None:
    rest = "2026-11-21T19:09:33|42|4|1|cpu=4|00:00.000"
    (usage,) = sacct.parse_usage(f"7|RUNNING|cpu|{rest}\n7.0|RUNNING||{rest}\n")
    assert usage.cpu_s is None


def test_the_window_is_given_and_begins_before_the_submission() -> None:
    argv = sacct.arguments(["9"], 86400.0 * 20000, ("a", "b"))
    assert "--starttime=2024-10-03T23:00:00" in argv
    assert "--clusters=a,b" in argv
    assert "--starttime=1970-01-01T00:00:00" in sacct.arguments(["9"], None, ())


def test_scontrols_jobs() -> None:
    jobs = by_id(scontrol.parse_jobs(recorded("scontrol-job-22.05.txt")))
    columns = by_id(squeue.parse(recorded("squeue-22.05.txt")))
    assert set(jobs) == {"11+0", "11+1", "11+2", "14"}
    for name, job in jobs.items():
        told = columns[name]
        for key in job.__struct_fields__:
            if key not in {"source", "cluster", "comment"}:
                assert getattr(job, key) == getattr(told, key), (name, key)
    assert jobs["11+0"].comment == "rm-x"


def test_a_site() -> None:
    names = ("scontrol-config", "scontrol-partition", "sinfo")
    site = scontrol.site(*(recorded(f"{name}-22.05.txt") for name in names))
    assert (site.cluster, site.version, site.bf_interval_s, site.accounting) == ("ci", (22, 5, 8), 1, True)
    assert (site.preempt_type, site.preempt_mode) == ("preempt/partition_prio", "REQUEUE")
    assert (site.kill_wait_s, site.signals_preempted) == (3, False)
    config = "SlurmctldParameters     = cloud_dns,preempt_send_user_signal\n"
    assert scontrol.site(config, "", "").signals_preempted
    default, gpu, preempt = site.partition(None), site.partition("gpu"), site.partition("preempt")
    assert default is not None
    assert gpu is not None
    assert preempt is not None
    assert (default.name, default.cpus, default.mem_mib, default.max_time_min) == ("cpu", 8, 16000, 1440)
    assert default.nodes == ("cpu1", "cpu2", "cpu3", "cpu4", "cpu5")
    assert (gpu.gpus, gpu.gres, gpu.preempt_mode, gpu.grace_time_s) == (2, "gpu:fake:2", "OFF", 0)
    assert (preempt.gpus, preempt.preempt_mode, preempt.grace_time_s) == (2, "REQUEUE", 5)
    assert site.partition("nowhere") is None
    assert {part.name for part in site.partitions_of("gpu,nowhere,preempt")} == {"gpu", "preempt"}
    assert {node.name for node in site.nodes_of("gpu")} == {"gpu1", "gpu2"}
    states = {node.name: (node.state, node.idle_cpus) for node in site.nodes}
    assert states["cpu5"] == ("alloc", 0)
    assert states["cpu4"] == ("plnd", 8), "kept for a job that is next: not free for others"


@pytest.mark.parametrize(("small", "size"), [("No", 500), ("Yes", 0)])
def test_a_sites_points_for_waiting_and_for_size(small: str, size: int) -> None:
    said = (
        f"PriorityFavorSmall      = {small}\nPriorityMaxAge          = 7-00:00:00\nPriorityWeightAge       = 6048\n"
        "PriorityWeightJobSize   = 500\n"
    )
    site = scontrol.site(said, "", "")
    assert (site.age_points, site.age_most, site.size_most) == (0.01, 6048, size)
    assert scontrol.site("", "", "").age_points == 0


def test_a_site_that_says_little() -> None:
    site = scontrol.site("SLURM_VERSION           = 24.11.5\nPreemptType = (null)\n", "", "")
    assert (site.version, site.preempt_type, site.bf_interval_s, site.accounting) == (
        (24, 11, 5),
        "preempt/none",
        30,
        False,
    )
    assert scontrol.parse_nodes("n1|p|down*|8|16000+|0/0/8/8|gpu:2|(null)\nrubbish\n")[0].state == "down"


def test_fair_share() -> None:
    share = parse_shares(recorded("sshare-22.05.txt"), "alice")
    assert share is not None
    assert (share.user, share.account) == ("alice", "physics")
    assert share.factor is not None
    assert 0 <= share.factor <= 1
    assert share.share == pytest.approx(0.47619)
    both = "a||0.5|0.9|\n a|alice|1.0|0.9|0.1\nb||0.5|0.1|\n b|alice|1.0|0.1|0.8\n"
    better = parse_shares(both, "alice")
    assert better is not None
    assert (better.account, better.factor, better.usage) == ("b", 0.8, 0.1)
    assert parse_shares(both, "bob") is None
    infinite = parse_shares("a||inf|nan|\n a|bob|1|1|inf\n", "bob")
    assert infinite is not None
    assert (infinite.factor, infinite.share) == (None, None)
