"""Resolved configurations for the tests of launch.slurm: composed as from the command line, with paths of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from conf.schema import Config
from launch.compose import compose
from launch.resolve import resolve
from launch.slurm.shapes import Job, added_job, jobs_of

RUN_DIR = "/shared/alice/runs/one"
PYTHON = "/shared/rollmill/.venv/bin/python"
RUN_ID = "rm-20260101-120000-ab12"

POOLS = [
    "cluster.partition=cpu", "cluster.account=physics",
    "control.mem_gib=0.5",
    "pools.init.workers=2", "pools.init.mem_gib=0.25", "pools.init.time_min=30",
    "pools.run.nodes=2", "pools.run.workers=2", "pools.run.cpus_per_task=2", "pools.run.mem_gib=1",
    "pools.run.time_min=30",
    "pools.eval.mem_gib=0.3", "pools.eval.time_min=30",
    "fleet.nodes=2", "fleet.replicas=3", "fleet.gpus_per_replica=1", "fleet.mem_gib=1", "fleet.partition=gpu",
    "fleet.time_min=30",
]  # fmt: skip
SITE = [
    "cluster.constraint=cpu", "cluster.exclude=[cpu4,cpu5]", "cluster.nice=5", "cluster.continue_by=none",
    "cluster.setup=['module purge','module load cuda/12']",
    "cluster.extra_sbatch=['--mail-type=END','--hint=nomultithread']",
]  # fmt: skip


def make(*overrides: str, run_dir: str = RUN_DIR) -> Config:
    """The resolved configuration of these overrides."""
    composed = compose([f"run_dir='{run_dir}'", *overrides], []).config
    return resolve(composed, cwd=Path("/shared/alice"), now=datetime(2026, 1, 1, 12), token="ab12")


def golden_jobs() -> dict[str, tuple[Config, Job]]:
    """File name -> the job that it holds the script of; every one can be had on the test cluster."""
    plain, site, external = make(*POOLS), make(*POOLS, *SITE), make("fleet=external", "fleet.urls=[http://gpu:8000]")
    spaced = make("cluster.partition=cpu", run_dir="/shared/alice b/one run")
    linked = jobs_of(plain, "linked")
    colocated = make(*POOLS, "fleet.partition=null", "cluster.partition=gpu", "pools.run.workers=1")
    found: dict[str, Sequence[tuple[Config, Job]]] = {
        "het": [(plain, jobs_of(plain, "het")[0])],
        "het-defaults": [(make(), jobs_of(make(), "het")[0])],
        "het-external-fleet": [(external, jobs_of(external, "het")[0])],
        "linked": [(plain, job) for job in linked],
        "linked-site": [(site, jobs_of(site, "linked")[0])],
        "linked-spaced": [(spaced, jobs_of(spaced, "linked")[0])],
        "colocated": [(colocated, jobs_of(colocated, "colocated")[0])],
        "added": [(plain, added_job(plain, "run", 3, 5, nth=2, partition="preempt"))],
    }
    return {
        f"{name}.sh" if len(jobs) == 1 else f"{name}-{job.name}.sh": (config, job)
        for name, jobs in found.items()
        for config, job in jobs
    }
