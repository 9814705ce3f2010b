"""The batch script of a job as text: submitit's parameters a component, the srun line of every step, and their frame.

The script shows every srun, but does not run them: it becomes the leader (launch.slurm.leader), which reads the lines
from its standard input, puts the attempt's number in for $ROLLMILL_ATTEMPT and starts them itself, without a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.schema import Config
from launch.slurm.shapes import Component, Job, Step
from stages.layout import RunLayout

ATTEMPT = "$ROLLMILL_ATTEMPT"
"""Stands in a step's line for the number of the run's attempt, which only the leader knows."""

MARK = "STEPS"
"""Ends the here-document that holds the lines."""

_BARE = re.compile(r"[\w@%+=:,./$-]+", re.ASCII)
_BATCH_ONLY = ("--output=", "--error=", "--open-mode=", "--signal=")
"""Options of the batch script, which the first component alone has."""


def job_name(run_id: str, job: Job, token: str) -> str:
    """A name that no other submission has, by which one of unknown outcome is found again; `token`: some hex digits."""
    return f"rollmill-{run_id}-{job.name}-{token}"


def parameters(job: Job, config: Config, run_id: str) -> list[dict[str, Any]]:
    """What submitit calls the parameters of a job, one mapping a component."""
    return [_parameters(job, component, config, run_id) for component in job.components]


def _parameters(job: Job, component: Component, config: Config, run_id: str) -> dict[str, Any]:
    cluster = config.cluster
    found: dict[str, Any] = {
        "nodes": component.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": component.cpus_per_task,
        "mem": None if component.mem_mib is None else f"{component.mem_mib}M",
        # --gpus-per-node cannot be taken back by a step that wants none (Slurm 22.05), and needs select/cons_tres.
        "gres": f"gpu:{component.gpus}" if component.gpus else None,
        "partition": component.partition,
        "account": component.account,
        "qos": component.qos,
        "time": component.time_min,
        "constraint": cluster.constraint,
        "exclude": ",".join(cluster.exclude) or None,
        "comment": run_id,
        "wckey": None,
        "stderr_to_stdout": True,
    }
    further: dict[str, Any] = {
        "signal": f"B:USR2@{job.signal_s}",
        "output": str(_unexpanded(RunLayout(config.run_path).slurm) / "%j.out"),
        "requeue" if cluster.continue_by == "requeue" else "no-requeue": True,
        "reservation": cluster.reservation,
        "nice": cluster.nice,
        "clusters": ",".join(cluster.clusters) or None,
        "no-kill": True if job.no_kill else None,
    }
    found["additional_parameters"] = {key: value for key, value in further.items() if value is not None}
    return found


def srun_line(job: Job, step: Step, run_dir: Path, python: str) -> str:
    """The command that starts a step, one line of shell words.

    Everything is said: a step inherits the figures of the batch shell's component, which need not be its own.
    """
    log = _unexpanded(run_dir) / "logs" / f"attempt_{ATTEMPT}" / f"{step.name}-node%n.log"
    words = ["srun", *([f"--het-group={step.component}"] if job.het else [])]
    words += [f"--nodes={step.nodes}", f"--ntasks={step.nodes}", f"--cpus-per-task={step.cpus}"]
    words += _share(job, step)
    words += ["--mpi=none", "--kill-on-bad-exit=0", "--wait=0", *(["--no-kill"] if job.no_kill else [])]
    words += ["--unbuffered", "--open-mode=append", f"--output={log}"]
    return " ".join(map(quote, [*words, python, "-P", "-u", "-m", *step.argv]))


def _share(job: Job, step: Step) -> list[str]:
    """What of shared nodes it gets: all of them, as two exact shares may not fit where a core has several threads."""
    if not step.shared:
        return []
    has_gpus = any(component.gpus for component in job.components)
    return ["--overlap", *(["--gres=none"] if has_gpus and not step.gpus else [])]


def step_lines(job: Job, config: Config, python: str) -> list[str]:
    """One line for every step of the job."""
    return [srun_line(job, step, config.run_path, python) for step in job.steps]


def setup_lines(config: Config) -> list[str]:
    """What the batch shell does before it becomes the leader."""
    return [*config.cluster.setup, "umask 077"]


def script(
    headers: Sequence[Iterable[str]],
    setup: Iterable[str],
    command: str,
    steps: Iterable[str],
    extra: Sequence[str] = (),
) -> str:
    """The batch script.

    Args:
        headers: the #SBATCH lines of each component.
        setup: shell lines.
        command: what the batch shell becomes.
        steps: lines for its standard input.
        extra: further options of every component, as on sbatch's command line.
    """
    lines = ["#!/bin/bash"]
    for place, header in enumerate(headers):
        if place:
            lines.append("#SBATCH hetjob")
        lines += [line for line in header if not place or not _is_batch_only(line)]
        lines += [f"#SBATCH {option}" for option in extra]
    lines += ["", *setup, "export SUBMITIT_EXECUTOR=slurm", f"exec {command} <<'{MARK}'", *steps, MARK, ""]
    return "\n".join(lines)


def read_steps(text: str, attempt: int) -> list[list[str]]:
    """The argument vectors of the lines that `script` gives to the leader, with the attempt's number put in."""
    words = [shlex.split(line) for line in text.splitlines() if line.strip()]
    return [[word.replace(ATTEMPT, str(attempt)) for word in line] for line in words]


def quote(word: str) -> str:
    """One shell word; what stands for a number ($, %) stays readable."""
    return word if _BARE.fullmatch(word) else shlex.quote(word)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment to submit with: none of an outer job's facts, and no option that the configuration does not show.

    sbatch takes SBATCH_* before what the script says, and a submission from inside a job would hand that job's SLURM_*
    on to the new one.
    """
    kept = ("SLURM_CONF", "SLURM_JWT")
    dropped = (
        "SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_", "ROLLMILL_ATTEMPT", "ROLLMILL_SUPERVISED",
        # Slurm says which GPUs a step has; where it has none, the submitting shell's must not be left.
        "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL",
    )  # fmt: skip
    return {key: value for key, value in inherited.items() if key in kept or not key.startswith(dropped)}


def _unexpanded(path: Path) -> Path:
    """Slurm reads % in an output's path as the beginning of a replacement."""
    return Path(str(path).replace("%", "%%"))


def _is_batch_only(line: str) -> bool:
    return line.removeprefix("#SBATCH ").startswith(_BATCH_ONLY)
