"""The batch scripts, byte for byte; `python -m tests.unit.launch.slurm.test_render` writes the golden files anew."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from launch.slurm import executor, render
from launch.slurm.shapes import Share, added_job, jobs_of
from tests.unit.launch.slurm.configs import POOLS, PYTHON, RUN_DIR, RUN_ID, golden_jobs, make

GOLDEN = Path(__file__).parent / "golden"
JOBS = golden_jobs()


def rendered(name: str) -> str:
    config, job = JOBS[name]
    return executor.text(job, config, run_id=RUN_ID, name=render.job_name(RUN_ID, job, "0f0f"), python=PYTHON)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_script_is_its_golden_file(name: str) -> None:
    assert rendered(name) == (GOLDEN / name).read_text()


def test_every_golden_file_belongs_to_a_job() -> None:
    assert {path.name for path in GOLDEN.glob("*.sh")} == set(JOBS)


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_a_het_job_has_a_header_a_component_and_one_output_and_signal() -> None:
    text = rendered("het.sh")
    assert lines(text, "#SBATCH hetjob") == ["#SBATCH hetjob"] * 4
    for option in ("--output=", "--signal=", "--open-mode="):
        assert len(lines(text, f"#SBATCH {option}")) == 1
        assert text.index(f"#SBATCH {option}") < text.index("#SBATCH hetjob")
    assert lines(text, "#SBATCH --signal=") == ["#SBATCH --signal=B:USR2@90"]
    assert lines(text, "#SBATCH --no-kill") == []
    assert [line.split("--gres=")[1] for line in lines(text, "#SBATCH --gres")] == ["gpu:2"]
    groups = [line.split()[1] for line in lines(text, "srun")]
    assert groups == [f"--het-group={place}" for place in range(5)]


def test_a_linked_job_outlives_a_node_and_says_so_to_its_step_too() -> None:
    run = rendered("linked-run.sh")
    assert lines(run, "#SBATCH --no-kill") and " --no-kill " in lines(run, "srun")[0]
    assert "--no-kill" not in rendered("linked-control.sh")  # one node: nothing is left when it is lost
    assert "--het-group" not in run


def test_colocated_steps_share_their_nodes_and_the_router_sees_no_gpu() -> None:
    control, everything = lines(rendered("colocated.sh"), "srun")
    assert " --overlap " in control and " --overlap " in everything
    assert " --gres=none " in control and "--gres" not in everything
    assert " --nodes=1 " in control and " --nodes=2 " in everything


def test_the_leader_gets_each_step_as_words_with_its_attempt() -> None:
    text = rendered("linked-spaced.sh")
    inside = text.split(f"<<'{render.MARK}'\n")[1].split(f"\n{render.MARK}\n")[0]
    (words,) = render.read_steps(inside, 3)
    assert "--output=/shared/alice b/one run/logs/attempt_3/control-node%n.log" in words
    assert words[words.index("launch.slurm.step") :] == [
        "launch.slurm.step", "/shared/alice b/one run", "control", "router=1,1-1",
    ]  # fmt: skip
    assert "launch.slurm.entry '/shared/alice b/one run/slurm'/" in text


def test_setup_comes_before_the_leader_and_extra_options_into_every_component() -> None:
    config = make(*POOLS, "cluster.setup=[module load cuda]", "cluster.extra_sbatch=['--mail-type=END']")
    text = executor.text(jobs_of(config, "het")[0], config, run_id=RUN_ID, name="n", python=PYTHON)
    assert text.index("module load cuda\numask 077\n") < text.index("exec ")
    assert len(lines(text, "#SBATCH --mail-type=END")) == 5


@pytest.mark.parametrize(
    ("way", "wanted"), [("requeue", "--requeue"), ("resubmit", "--no-requeue"), ("none", "--no-requeue")]
)
def test_only_a_run_that_goes_on_by_requeue_may_be_requeued(way: str, wanted: str) -> None:
    config = make(f"cluster.continue_by={way}")
    for job in jobs_of(config, "linked"):
        text = executor.text(job, config, run_id=RUN_ID, name="n", python=PYTHON)
        assert lines(text, "#SBATCH --requeue") + lines(text, "#SBATCH --no-requeue") == [f"#SBATCH {wanted}"]


@pytest.mark.parametrize(("minutes", "signal_s"), [(1, 20), (3, 60), (5, 90), (600, 90)])
def test_the_signal_comes_a_third_of_the_limit_before_it_at_most(minutes: int, signal_s: int) -> None:
    config = make(f"pools.run.time_min={minutes}")
    job = next(job for job in jobs_of(config, "linked") if job.name == "run")
    text = executor.text(job, config, run_id=RUN_ID, name="n", python=PYTHON)
    assert lines(text, "#SBATCH --signal=") == [f"#SBATCH --signal=B:USR2@{signal_s}"]


def test_the_name_is_the_submissions_own() -> None:
    job = jobs_of(make(), "het")[0]
    assert render.job_name(RUN_ID, job, "0f0f") == f"rollmill-{RUN_ID}-het-0f0f"


def test_added_workers_go_on_counting_and_fill_nodes_as_the_pool_does() -> None:
    config, job = JOBS["added.sh"]
    assert job.name == "run+2"
    (step,) = job.steps
    (share,) = step.shares
    assert (job.components[0].nodes, share) == (2, Share(kind="run", per_node=2, first=5, last=7))
    assert [list(share.numbers_on(node)) for node in range(3)] == [[5, 6], [7], []]
    assert added_job(config, "init", 1, 9).components[0].cpus_per_task == 1


def test_submitting_from_inside_a_job_takes_nothing_of_it_along() -> None:
    inherited = {
        "PATH": "/bin", "HOME": "/home/alice", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "4", "SBATCH_PARTITION": "debug", "SRUN_CPUS_PER_TASK": "4",
        "SUBMITIT_EXECUTOR": "slurm",
        "PMIX_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1", "ROLLMILL_ATTEMPT": "3", "ROLLMILL_DEBUG": "1",
    }  # fmt: skip
    kept = {"PATH", "HOME", "SLURM_CONF", "ROLLMILL_DEBUG"}
    assert set(render.environment(inherited)) == kept


def test_a_percent_sign_in_a_path_is_none_of_slurms_replacements() -> None:
    config = make(run_dir="/shared/50%j/one")
    job = jobs_of(config, "linked")[0]
    assert "/shared/50%%j/one/logs/" in render.srun_line(job, job.steps[0], config.run_path, PYTHON)


def test_words_keep_what_the_leader_or_slurm_replaces_readable() -> None:
    assert render.quote(f"--output={RUN_DIR}/attempt_{render.ATTEMPT}/x-node%n.log").startswith("--output=/shared")
    assert shlex.split(render.quote("a b'c")) == ["a b'c"]


if __name__ == "__main__":
    for path in GOLDEN.glob("*.sh"):
        path.unlink()
    for golden in JOBS:
        (GOLDEN / golden).write_text(rendered(golden))
