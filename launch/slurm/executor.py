"""Submission by submitit: its executor, subclassed, which writes one sbatch for several components and finds lost jobs.

The only module that knows submitit. `update_parameters` takes what submitit's users know (also the names of its
AutoExecutor) and holds for every component; `components` holds what one of them has of its own.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import submitit
from submitit.core import utils
from submitit.slurm.slurm import SlurmInfoWatcher

from conf.schema import Config
from launch.slurm import render
from launch.slurm.sbatch import Find, Sbatch
from launch.slurm.shapes import Job
from stages import sharedfs
from stages.layout import RunLayout

POLL_S: Final = 30.0


@dataclass(frozen=True)
class Submitted:
    """An accepted submission; `cluster` is named on a multi-cluster site alone."""

    name: str
    job_id: str
    cluster: str | None
    script: Path


def submit(
    job: Job,
    config: Config,
    *,
    run_id: str,
    function: Callable[..., int],
    args: Sequence[Any] = (),
    name: str | None = None,
    python: str = sys.executable,
    find: Find | None = None,
) -> Submitted:
    """Submit one job of a run, whose leader calls `function(*args)`; one call of slurmctld where all goes well.

    Args:
        job: what to ask for.
        config: the run's.
        run_id: goes into name and comment.
        function: importable, for it is pickled by its name.
        args: its arguments.
        name: the unique job name (render.job_name), for a caller that notes it down first; None: made here.
        python: the interpreter of the jobs.
        find: how a submission of unknown outcome is looked for; None: one squeue.

    Raises:
        SubmissionError: refused (`.refused`), or Slurm could not be reached.
    """
    executor = _executor(job, config, run_id, python, find)
    submitted = executor.submit_as(name or render.job_name(run_id, job, secrets.token_hex(2)), function, *args)
    return Submitted(submitted.name, submitted.job_id, submitted.cluster, submitted.script)


def text(job: Job, config: Config, *, run_id: str, name: str, python: str = sys.executable) -> str:
    """The batch script that `submit` would hand in; needs no Slurm and writes nothing."""
    return _executor(job, config, run_id, python, None).text(name)


def _executor(job: Job, config: Config, run_id: str, python: str, find: Find | None) -> RollmillExecutor:
    sbatch = Sbatch(config.cluster.clusters, find=find)
    executor = RollmillExecutor(RunLayout(config.run_path).slurm, python=shlex.quote(python), sbatch=sbatch)
    executor.update_parameters(setup=render.setup_lines(config))
    executor.components = render.parameters(job, config, run_id)
    executor.extra = list(config.cluster.extra_sbatch)
    executor.stdin = render.step_lines(job, config, python)
    return executor


class Watcher(SlurmInfoWatcher):
    """submitit's shared watcher, asking sacct only for who waits on a job, half a minute apart, and knowing het ids."""

    def update_if_long_enough(self, mode: str) -> None:
        """Ask where that is due; never within half a minute of a submission."""
        since = time.time() - max(self._last_status_check, self._start_time)
        if mode == "force" or (mode == "standard" and since > POLL_S):
            self.update()

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """State by the leader's id: sacct names the components of a het job 9+0, 9+1 and so on."""
        lines = (string if isinstance(string, str) else string.decode()).splitlines()
        found: dict[str, dict[str, str]] = {}
        for line in lines[1:]:
            row = dict(zip(lines[0].split("|"), line.split("|"), strict=False))
            job_id, offset = (re.fullmatch(r"(\d+)(\+\d+)?", row.get("JobID", "")) or _NO_MATCH).groups()
            if job_id and (offset in (None, "+0") or job_id not in found):
                found[job_id] = row
        return found


class _NoMatch:
    def groups(self) -> tuple[None, None]:
        return None, None


_NO_MATCH = _NoMatch()


class _Paths(utils.JobPaths):
    """Where our batch output is; both streams are one file."""

    @property
    def stdout(self) -> Path:
        return Path(self._format_id(self.folder / "%j.out"))

    @property
    def stderr(self) -> Path:
        return self.stdout


class RollmillJob(submitit.SlurmJob[Any]):
    """A handle on one submission: submitit's, with one poll for all handles and none at submission."""

    watcher = Watcher(delay_s=int(POLL_S))
    name = ""
    cluster: str | None = None
    script = Path()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder=folder, job_id=job_id, tasks=tasks)
        self._paths = _Paths(folder, job_id=job_id, task_id=self.task_id)

    def cancel(self, check: bool = True) -> None:
        """Cancel the job with all its components: the leader's id stands for them."""
        words = [*([f"--clusters={self.cluster}"] if self.cluster else []), self.job_id]
        subprocess.run(["scancel", *words], check=check)


class _Header(submitit.SlurmExecutor):
    """submitit's executor as the writer of one component's header, where no Slurm is needed."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def lines(self) -> list[str]:
        """The #SBATCH lines of the parameters."""
        made = self._make_submission_file_text(command="", uid="")
        return [line for line in made.splitlines() if line.startswith("#SBATCH ")]


class RollmillExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor for one sbatch of one or several components.

    Args:
        folder: where scripts, pickles, results and batch output go; on the shared filesystem.
        python: the interpreter, as a shell word; None: this one.
        sbatch: hands the scripts in.
    """

    job_class = RollmillJob

    def __init__(self, folder: Path | str, *, python: str | None = None, sbatch: Sbatch | None = None) -> None:
        super().__init__(folder, python=python)
        self.components: Sequence[Mapping[str, Any]] = ({},)
        self.extra: Sequence[str] = ()
        self.stdin: Sequence[str] = ()
        self.sbatch = sbatch or Sbatch()

    @classmethod
    def affinity(cls) -> int:
        """Always usable: what is missing is said when something is submitted, and a script can be shown anywhere."""
        return 2

    def submit_as(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RollmillJob:
        """Submit under a unique name of the caller's making.

        Raises:
            SubmissionError: refused, or Slurm could not be reached.
        """
        return self._submit_one(utils.DelayedSubmission(function, *args, **kwargs), name)

    def text(self, name: str) -> str:
        """The batch script of a submission of this name."""
        return self._make_submission_file_text(f"{self._submitit_command_str}/{shlex.quote(name)}.pkl", name)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        names: Mapping[str, Any] = self._equivalence_dict()
        generic: dict[str, Any] = {str(names.get(key, key)): value for key, value in kwargs.items()}
        if isinstance(generic.get("mem"), (int, float)):
            generic["mem"] = f"{generic['mem'] * 1024:.0f}M"
        super()._internal_update_parameters(**generic)

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -P -u -m launch.slurm.entry {shlex.quote(str(self.folder))}"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        common = {key: value for key, value in self.parameters.items() if key != "setup"}
        headers = []
        for own in self.components:
            header = _Header(self.folder)
            merged: dict[str, Any] = {"use_srun": False, **common, **own, "job_name": uid}
            header.update_parameters(**merged)
            headers.append(header.lines())
        return render.script(headers, self.parameters.get("setup") or (), command, self.stdin, self.extra)

    def _internal_process_submissions(self, delayed_submissions: list[Any]) -> list[Any]:
        """One sbatch each: an array of heterogeneous jobs is nothing that Slurm has."""
        base = self.parameters.get("job_name", "rollmill")
        return [self._submit_one(delayed, f"{base}-{secrets.token_hex(4)}") for delayed in delayed_submissions]

    def _submit_one(self, delayed: Any, name: str) -> RollmillJob:
        folder = Path(self.folder)
        sharedfs.make_dirs(folder)
        script, pickled = folder / f"{name}.sh", folder / f"{name}.pkl"
        # Everything that the job reads is in place before it can start.
        temp = sharedfs.temp_beside(pickled)
        delayed.dump(temp)
        temp.chmod(0o600)
        sharedfs.publish(temp, pickled)
        sharedfs.write_atomic(script, self.text(name).encode())
        job_id, cluster = self.sbatch.submit(script, name)
        job = RollmillJob(folder=folder, job_id=job_id)
        job.name, job.cluster, job.script = name, cluster, script
        for link, target in ((job.paths.submission_file, script), (job.paths.submitted_pickle, pickled)):
            with contextlib.suppress(FileExistsError):
                Path(link).symlink_to(target.name)
        return job
