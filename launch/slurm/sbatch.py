"""sbatch as a command with answers that cannot be trusted: refused, not reached, or of an outcome that nobody knows.

A call that timed out, was killed or printed nothing may have submitted. Its unique job name is then looked for before
another try, and a job that turns up late is cancelled.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from launch.slurm import render
from launch.slurm.errors import SubmissionError

SBATCH_TIMEOUT_S: Final = 180.0
"""Longer than sbatch's own patience with a busy slurmctld (MessageTimeout, 10 s by default, and its retries)."""
TEST_TIMEOUT_S: Final = 20.0
TRIES: Final = 3
RETRY_S: Final = 5.0

_UNKNOWN = ("socket timed out", "zero bytes", "unexpected message", "not connected", "connection reset")
_UNREACHED = (
    "unable to contact",
    "connection refused",
    "unable to establish",
    "no route to host",
    "network is",
    "authentication",
    "munge",
)

Run = Callable[[list[str], float], "subprocess.CompletedProcess[str]"]
Find = Callable[[str], Sequence[str]]
"""Job ids, leaders' alone, of the jobs that have this name."""


class Sbatch:
    """Hands scripts in.

    Args:
        clusters: of a multi-cluster site; empty: this machine's.
        run: starts a command with a time limit (seconds); replaced in tests.
        find: how a submission of unknown outcome is looked for; None: one squeue.
        sleep: waits; replaced in tests.
    """

    def __init__(
        self,
        clusters: Sequence[str] = (),
        *,
        run: Run | None = None,
        find: Find | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cluster_names = list(clusters)
        self._run = run or command
        self._find = find or self._ask_squeue
        self._sleep = sleep

    def submit(self, script: Path, name: str) -> tuple[str, str | None]:
        """(job id, cluster) of the script's one job, also when sbatch itself could not tell.

        Raises:
            SubmissionError: refused (`.refused`), or not reached in several tries.
        """
        last, doubtful = "", False
        for attempt in range(TRIES):
            if attempt:
                self._sleep(RETRY_S * attempt)
            answer = self._call(script)
            if answer is None:
                last = f"sbatch did not answer within {SBATCH_TIMEOUT_S:.0f} s"
            elif answer.returncode == 0 and (found := _accepted(answer.stdout)):
                return self._sole(name, found) if doubtful else found
            else:
                last = first_error(answer.stderr) or f"sbatch ended with code {answer.returncode} and said nothing"
                if _is_refusal(answer):
                    raise SubmissionError(
                        f"Slurm refused {script}: {last}; change what it names (action=plan shows what is asked for)",
                        refused=True,
                    )
                if _is_unreached(answer):
                    continue
            # A slurmctld that was slow to answer may have taken the job, or take it in a moment.
            doubtful = True
            self._sleep(RETRY_S)
            if known := list(self._find(name)):
                return self._sole(name, (known[0], None))
        raise SubmissionError(f"{script} could not be submitted: {last}; try again when `sinfo` answers")

    def _sole(self, name: str, kept: tuple[str, str | None]) -> tuple[str, str | None]:
        """Cancel what else has the name: an earlier try that was taken after all, later than we looked."""
        for job_id in self._find(name):
            if job_id != kept[0]:
                self._run(["scancel", *self._clusters, job_id], SBATCH_TIMEOUT_S)
        return kept

    @property
    def _clusters(self) -> list[str]:
        return [f"--clusters={','.join(self._cluster_names)}"] if self._cluster_names else []

    def _call(self, script: Path) -> subprocess.CompletedProcess[str] | None:
        try:
            return self._run(["sbatch", str(script)], SBATCH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        except FileNotFoundError as error:
            raise SubmissionError(
                "sbatch is not on PATH: submit from a node that has Slurm's commands, or use placement=local"
            ) from error

    def _ask_squeue(self, name: str) -> list[str]:
        command = ["squeue", *self._clusters, "--noheader", "--states=all", f"--name={name}", "--format=%i"]
        with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
            answer = self._run(command, SBATCH_TIMEOUT_S)
            ids = [match[1] for match in re.finditer(r"^(\d+)", answer.stdout, re.MULTILINE)]
            return sorted(set(ids), key=int)
        return []


def command(argv: list[str], timeout_s: float, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; its own session, so that an impatient Ctrl-C does not cut a submission in two."""
    environment = {**render.environment(os.environ), "LC_ALL": "C"}
    return subprocess.run(
        argv, input=text, capture_output=True, text=True, errors="replace", timeout=timeout_s,
        env=environment, umask=0o077, start_new_session=True, check=False,
    )  # fmt: skip


def test_only(script: str) -> tuple[int, str]:
    """What `sbatch --test-only` says of a batch script: (exit code, words). It submits nothing and writes nothing."""
    try:
        answer = command(["sbatch", "--test-only"], TEST_TIMEOUT_S, script)
    except subprocess.TimeoutExpired:
        return 124, f"sbatch --test-only did not answer within {TEST_TIMEOUT_S:.0f} s"
    except FileNotFoundError:
        return 127, "sbatch is not on PATH"
    return answer.returncode, answer.stderr + answer.stdout


def _accepted(output: str) -> tuple[str, str | None] | None:
    match = re.search(r"^Submitted batch job (\d+)(?: on cluster (\S+))?", output, re.MULTILINE)
    return (match[1], match[2]) if match else None


def _is_unreached(answer: subprocess.CompletedProcess[str]) -> bool:
    """Whether nobody was there to take the job."""
    return answer.returncode > 0 and any(word in answer.stderr.lower() for word in _UNREACHED)


def _is_refusal(answer: subprocess.CompletedProcess[str]) -> bool:
    """Whether Slurm said no; a signal (negative code), silence or a transport's trouble is not that."""
    said = answer.stderr.lower()
    return answer.returncode > 0 and bool(said.strip()) and not any(word in said for word in (*_UNKNOWN, *_UNREACHED))


def first_error(said: str) -> str:
    """Slurm's own first error line, else whatever it said first; "" for silence."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or line.startswith("allocation failure")]
    found = (errors or lines or [""])[0]
    return found.removeprefix("sbatch: ").removeprefix("error: ")
