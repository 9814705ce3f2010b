"""Configurations as jobs, components and steps: how many nodes, CPUs, MiB, GPUs, and which processes where."""

from __future__ import annotations

import pytest

from launch.slurm.shapes import Component, Job, Share, jobs_of
from tests.unit.launch.slurm.configs import POOLS, make


def component(job: Job, name: str) -> Component:
    return next(one for one in job.components if one.name == name)


def test_het_is_one_job_of_control_pools_and_fleet() -> None:
    (job,) = jobs_of(make(*POOLS), "het")
    assert [one.name for one in job.components] == ["control", "init", "run", "eval", "fleet"]
    assert (job.het, job.no_kill, job.nodes) == (True, False, 7)
    run = component(job, "run")
    assert (run.nodes, run.cpus_per_task, run.mem_mib, run.gpus, run.kinds) == (2, 4, 2048, 0, (("run", 2),))
    fleet = component(job, "fleet")
    assert (fleet.nodes, fleet.cpus_per_task, fleet.mem_mib, fleet.gpus) == (2, 2, 2048, 2)
    assert (fleet.partition, run.partition, run.account) == ("gpu", "cpu", "physics")


def test_an_external_fleet_is_no_component() -> None:
    config = make("fleet=external", "fleet.urls=[http://gpu:8000]")
    assert [job.name for job in jobs_of(config, "linked")] == ["control", "init", "run", "eval"]
    (everything,) = jobs_of(config, "colocated")
    assert [share.kind for share in everything.steps[1].shares] == ["init", "run", "eval"]


def test_linked_is_a_job_a_component_the_routers_first() -> None:
    jobs = jobs_of(make(*POOLS), "linked")
    assert [job.name for job in jobs] == ["control", "init", "run", "eval", "fleet"]
    assert [job.no_kill for job in jobs] == [False, False, True, False, True]  # no-kill where another node is left
    assert all(len(job.components) == len(job.steps) == 1 and not job.het for job in jobs)


def test_colocated_has_every_pool_on_every_node_and_room_for_the_router() -> None:
    config = make(*POOLS, "pools.run.nodes=3", "fleet.replicas=4")
    (job,) = jobs_of(config, "colocated")
    (everything,) = job.components
    assert (everything.nodes, job.no_kill) == (3, False)
    assert dict(everything.kinds) == {"router": 1, "init": 2, "run": 2, "eval": 1, "replica": 2}
    assert everything.cpus_per_task == 1 + 2 * 1 + 2 * 2 + 1 + 2 * 1
    assert everything.mem_mib == 512 + 2 * 256 + 2 * 1024 + 308 + 2 * 1024
    assert everything.gpus == 2
    control, rest = job.steps
    assert (control.nodes, rest.nodes, control.shared, rest.shared) == (1, 3, True, True)
    assert [str(share) for share in rest.shares] == ["init=2,1-6", "run=2,1-6", "eval=1,1-3", "replica=2,1-4"]


def test_memory_that_one_part_leaves_to_the_site_is_left_for_all_of_a_colocated_node() -> None:
    (job,) = jobs_of(make("pools.run.mem_gib=4"), "colocated")
    assert job.components[0].mem_mib is None


def test_every_process_has_one_number_and_no_node_more_than_its_part() -> None:
    for placement in ("het", "linked", "colocated"):
        for job in jobs_of(make(*POOLS), placement):  # type: ignore[arg-type]
            for step in job.steps:
                for share in step.shares:
                    numbers = [n for node in range(step.nodes) for n in share.numbers_on(node)]
                    assert numbers == list(range(share.first, share.last + 1))
                    assert all(len(share.numbers_on(node)) <= share.per_node for node in range(step.nodes))


@pytest.mark.parametrize(
    ("replicas", "nodes", "asked", "per_node"), [(3, 2, 2, 2), (1, 4, 1, 1), (5, 3, 3, 2), (4, 4, 4, 1), (4, 3, 2, 2)]
)
def test_replicas_are_spread_over_no_more_nodes_than_they_fill(
    replicas: int, nodes: int, asked: int, per_node: int
) -> None:
    config = make(f"fleet.replicas={replicas}", f"fleet.nodes={nodes}")
    fleet = component(jobs_of(config, "het")[0], "fleet")
    assert (fleet.nodes, fleet.kinds) == (asked, (("replica", per_node),))


def test_a_heterogeneous_job_has_one_time_limit_the_longest() -> None:
    (job,) = jobs_of(make("pools.run.time_min=30", "pools.eval.time_min=20"), "het")
    assert [one.time_min for one in job.components] == [30, 30, 30, 30, 30]
    linked = jobs_of(make("pools.run.time_min=30"), "linked")
    assert [job.components[0].time_min for job in linked] == [30, None, 30, None, None]  # the router outlives all


def test_words_of_a_step_are_read_back() -> None:
    share = Share(kind="replica", per_node=2, first=1, last=3)
    assert Share.parse(str(share)) == share
    for wrong in ("replica", "replica=2", "replica=2,1", "Replica=2,1-3", "replica=2,1-3 "):
        with pytest.raises(ValueError, match="is no share of a step"):
            Share.parse(wrong)


def test_account_partition_and_qos_come_from_the_pool_else_from_the_cluster() -> None:
    config = make("cluster.account=a", "cluster.qos=q", "cluster.partition=p", "pools.run.account=b", "pools.run.qos=r")
    run = component(jobs_of(config, "het")[0], "run")
    control = component(jobs_of(config, "het")[0], "control")
    assert (run.account, run.qos, run.partition) == ("b", "r", "p")
    assert (control.account, control.qos, control.partition) == ("a", "q", "p")
