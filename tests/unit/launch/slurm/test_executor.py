"""Submission without a Slurm: what sbatch may answer, and what becomes of the job; submitit's own ways still hold."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launch.slurm import executor, sbatch
from launch.slurm.errors import SubmissionError
from launch.slurm.executor import RollmillExecutor, RollmillJob, Watcher
from launch.slurm.sbatch import Sbatch
from launch.slurm.shapes import jobs_of
from tests.unit.launch.slurm.configs import RUN_ID, make

Answer = tuple[int, str, str] | BaseException
ACCEPTED = (0, "Submitted batch job 41\n", "")
REFUSED = (1, "", "sbatch: error: Batch job submission failed: Invalid qos specification\nsbatch: error: more\n")
UNREACHED = (
    1,
    "",
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
)
SLOW = (1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n")


class Slurm:
    """Answers commands from a list; remembers what was asked."""

    def __init__(self, *answers: Answer, known: Sequence[Sequence[str]] = ()) -> None:
        self.answers, self.known = list(answers), list(known)
        self.asked: list[list[str]] = []
        self.slept: list[float] = []

    def run(self, argv: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        self.asked.append(argv)
        if argv[0] != "sbatch":
            return subprocess.CompletedProcess(argv, 0, "", "")
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return subprocess.CompletedProcess(argv, *answer)

    def find(self, name: str) -> Sequence[str]:
        self.asked.append(["find", name])
        return self.known.pop(0) if self.known else []

    @property
    def commands(self) -> list[str]:
        return [argv[0] for argv in self.asked]


Make = Callable[[Slurm], RollmillExecutor]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    def make_one(slurm: Slurm) -> RollmillExecutor:
        handed = Sbatch(run=slurm.run, find=slurm.find, sleep=slurm.slept.append)
        return RollmillExecutor(tmp_path / "slurm", sbatch=handed)

    return make_one


def test_an_accepted_job_has_its_pickle_and_script_in_place_before_sbatch(made: Make, tmp_path: Path) -> None:
    slurm = Slurm(ACCEPTED)
    folder = tmp_path / "slurm"

    def look(argv: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        assert (folder / "one.pkl").exists() and Path(argv[1]) == folder / "one.sh"
        return slurm.run(argv, timeout_s)

    ours = made(slurm)
    ours.sbatch = Sbatch(run=look)
    job = ours.submit_as("one", os.getcwd)
    assert (job.job_id, job.name, job.cluster, job.script) == ("41", "one", None, folder / "one.sh")
    assert slurm.commands == ["sbatch"] and slurm.slept == []
    assert job.script.read_text() == ours.text("one")
    assert job.paths.submission_file.resolve() == job.script.resolve()
    assert job.submission().function is os.getcwd
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
    assert not list(folder.glob(".*"))


def test_the_cluster_that_took_it_is_known(made: Make) -> None:
    job = made(Slurm((0, "Submitted batch job 7 on cluster east\n", ""))).submit_as("one", os.getcwd)
    assert (job.job_id, job.cluster) == ("7", "east")


def test_a_refusal_is_one_line_with_slurms_own_words_and_is_not_tried_again(made: Make) -> None:
    slurm = Slurm(REFUSED)
    with pytest.raises(SubmissionError) as caught:
        made(slurm).submit_as("one", os.getcwd)
    assert caught.value.refused and slurm.commands == ["sbatch"]
    assert "Batch job submission failed: Invalid qos specification;" in str(caught.value)
    assert "more" not in str(caught.value)


def test_the_errors_first_line_counts_also_behind_other_words() -> None:
    said = "sbatch: lua: welcome\nsbatch: error: invalid partition: x\nsbatch: error: Batch job submission failed"
    assert sbatch.first_error(said) == "invalid partition: x"
    assert sbatch.first_error("allocation failure: Invalid qos\n") == "allocation failure: Invalid qos"
    assert sbatch.first_error("\n") == ""


UNKNOWN: list[Answer] = [SLOW, subprocess.TimeoutExpired("sbatch", 1), (-9, "", ""), (0, "", ""), (1, "", "")]


@pytest.mark.parametrize("answer", UNKNOWN)
def test_parity_b20_a_submission_of_unknown_outcome_is_looked_for_by_its_name(made: Make, answer: Answer) -> None:
    slurm = Slurm(answer, known=[["52"], ["52"]])
    job = made(slurm).submit_as("rollmill-x-het-0f0f", os.getcwd)
    assert job.job_id == "52"
    assert slurm.commands.count("sbatch") == 1
    assert ["find", "rollmill-x-het-0f0f"] in slurm.asked


@pytest.mark.parametrize("answer", UNKNOWN)
def test_what_was_not_taken_is_submitted_again(made: Make, answer: Answer) -> None:
    slurm = Slurm(answer, ACCEPTED)
    assert made(slurm).submit_as("one", os.getcwd).job_id == "41"
    assert slurm.commands.count("sbatch") == 2
    assert slurm.slept and min(slurm.slept) > 0


def test_a_first_try_that_was_taken_later_than_we_looked_is_cancelled(made: Make) -> None:
    slurm = Slurm(SLOW, ACCEPTED, known=[[], ["40", "41"]])
    assert made(slurm).submit_as("one", os.getcwd).job_id == "41"
    assert [argv for argv in slurm.asked if argv[0] == "scancel"] == [["scancel", "40"]]


def test_a_controller_that_is_not_there_is_no_refusal(made: Make) -> None:
    slurm = Slurm(UNREACHED, UNREACHED, UNREACHED)
    with pytest.raises(SubmissionError, match="Unable to contact") as caught:
        made(slurm).submit_as("one", os.getcwd)
    assert not caught.value.refused
    assert slurm.commands == ["sbatch"] * 3


def test_a_machine_without_slurm_says_so(made: Make) -> None:
    with pytest.raises(SubmissionError, match="sbatch is not on PATH"):
        made(Slurm(FileNotFoundError(2, "sbatch"))).submit_as("one", os.getcwd)


def test_submitits_parameters_mean_what_its_users_know(made: Make) -> None:
    ours = made(Slurm())
    ours.update_parameters(
        timeout_min=7, mem_gb=1.5, partition="cpu", gpus_per_node=1, tasks_per_node=2, setup=["module x"]
    )
    ours.components = [{}, {"partition": "gpu", "mem": "100M"}]
    text = ours.text("unique")
    first, second = text.split("#SBATCH hetjob\n")
    for line in (
        "--time=7",
        "--mem=1536M",
        "--partition=cpu",
        "--gpus-per-node=1",
        "--ntasks-per-node=2",
        "--job-name=unique",
    ):
        assert f"#SBATCH {line}\n" in first
    for line in ("--time=7", "--mem=100M", "--partition=gpu", "--job-name=unique"):
        assert f"#SBATCH {line}\n" in second
    assert text.count("module x") == 1 and "srun" not in text
    with pytest.raises(ValueError, match="no_such_thing"):
        ours.update_parameters(no_such_thing=1)


def test_submit_and_map_array_are_one_sbatch_each_with_names_of_their_own(made: Make) -> None:
    slurm = Slurm(*(((0, f"Submitted batch job {number}\n", "")) for number in (1, 2, 3)))
    ours = made(slurm)
    ours._throttling = 0
    jobs = [ours.submit(os.getcwd), *ours.map_array(abs, [1, 2])]
    assert [job.job_id for job in jobs] == ["1", "2", "3"]
    assert len({job.name for job in jobs}) == 3 and all(isinstance(job, RollmillJob) for job in jobs)
    assert not any("--array" in Path(argv[1]).read_text() for argv in slurm.asked)


def test_the_watcher_asks_nobody_at_submission_and_half_a_minute_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [1000.0], []
    monkeypatch.setattr(executor.time, "time", lambda: now[0])
    monkeypatch.setattr("submitit.core.core._time.time", lambda: now[0])

    def ask(command: list[str], shell: bool) -> bytes:
        asked.append(command)
        return b"JobID|State|NodeList\n9+0|RUNNING|n1\n9+0.batch|RUNNING|n1\n9+1|PENDING|\n"

    monkeypatch.setattr("submitit.core.core.subprocess.check_output", ask)
    watcher = Watcher(delay_s=30)
    watcher.register_job("9")
    assert watcher.get_state("9") == "UNKNOWN" and asked == []
    now[0] += 31
    assert watcher.get_state("9") == "RUNNING" and len(asked) == 1
    now[0] += 29
    assert watcher.get_state("9") == "RUNNING" and len(asked) == 1
    assert watcher.get_state("9", mode="force") == "RUNNING" and len(asked) == 2


def test_slurms_commands_get_a_clean_environment_and_their_own_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nenv > "$OUT"; umask >> "$OUT"; echo "Submitted batch job 5"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    for name in ("SLURM_JOB_ID", "SBATCH_ACCOUNT", "SLURM_CONF"):
        monkeypatch.setenv(name, "there")
    job = RollmillExecutor(tmp_path / "slurm").submit_as("one", os.getcwd)
    seen = (tmp_path / "out").read_text().splitlines()
    assert job.job_id == "5"
    assert [line for line in seen if line.startswith(("SLURM_", "SBATCH_"))] == ["SLURM_CONF=there"]
    assert "LC_ALL=C" in seen and seen[-1] == "0077"


def test_cancel_says_the_leaders_id_and_its_cluster(monkeypatch: pytest.MonkeyPatch, made: Make) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(executor.subprocess, "run", lambda argv, check: asked.append(argv))
    job = made(Slurm((0, "Submitted batch job 7 on cluster east\n", ""))).submit_as("one", os.getcwd)
    job.cancel()
    assert asked == [["scancel", "--clusters=east", "7"]]


def entry(folder: Path, job_id: str = "41", name: str = "one") -> subprocess.CompletedProcess[str]:
    """What the batch shell becomes."""
    return subprocess.run(
        [sys.executable, "-P", "-u", "-m", "launch.slurm.entry", str(folder / f"{name}.pkl")],
        env={**os.environ, "SLURM_JOB_ID": job_id}, capture_output=True, text=True, input="a step\n", timeout=60,
    )  # fmt: skip


def test_the_entry_calls_the_function_and_leaves_submitits_result(made: Make, tmp_path: Path) -> None:
    job = made(Slurm(ACCEPTED)).submit_as("one", divmod, 17, 5)
    ended = entry(tmp_path / "slurm")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert job.done() and job.result() == (3, 2)


def test_the_functions_number_is_the_exit_code_and_75_leaves_no_result(made: Make, tmp_path: Path) -> None:
    folder = tmp_path / "slurm"
    job = made(Slurm(ACCEPTED)).submit_as("one", abs, -3)
    assert entry(folder).returncode == 3 and job.result() == 3
    made(Slurm(ACCEPTED)).submit_as("on", abs, -75)
    assert entry(folder, name="on").returncode == 75
    assert not job.paths.result_pickle.exists()  # not even the one of the attempt before


def test_a_function_that_raises_ends_with_one_line_its_stack_and_a_result_that_says_so(
    made: Make, tmp_path: Path
) -> None:
    job = made(Slurm(ACCEPTED)).submit_as("one", int, "no number")
    ended = entry(tmp_path / "slurm")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("rollmill: ValueError: invalid literal")
    assert "no number" in str(job.exception())


def test_another_users_pickle_is_not_opened(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.slurm import entry as module

    made(Slurm(ACCEPTED)).submit_as("one", os._exit, 9)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setattr(module.os, "getuid", lambda: 12345)
    before = os.umask(0o077)
    try:
        assert module.main([str(tmp_path / "slurm" / "one.pkl")]) == 1
    finally:
        os.umask(before)


def test_a_runs_job_is_submitted_with_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(run_dir=str(tmp_path / "run"))
    job = jobs_of(config, "het")[0]
    asked: list[str] = []

    def answer(argv: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        asked.append(Path(argv[1]).read_text())
        return subprocess.CompletedProcess(argv, *ACCEPTED)

    monkeypatch.setattr(sbatch, "command", answer)
    done = executor.submit(job, config, run_id=RUN_ID, function=print, args=("x",))
    assert done.job_id == "41" and done.name.startswith(f"rollmill-{RUN_ID}-het-")
    assert done.script == tmp_path / "run" / "slurm" / f"{done.name}.sh"
    assert asked == [executor.text(job, config, run_id=RUN_ID, name=done.name)]
