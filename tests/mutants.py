"""Every parity test fails when its mending is switched off: `python -P -m tests.mutants [NAME...]`; exits 1 if not.

Each mutant is tried in a fork of this process, which has loaded the libraries that the tests need but nothing of ours:
to start Python and pytest for each takes longer than most of the tests.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.support import mutants
from tests.support.mutants import MUTANTS, UNCHANGED, Mutant, MutantError

LOADED = ("pytest", "hypothesis", "numpy", "pyarrow", "msgspec", "httpx", "starlette.applications", "uvicorn", "uvloop",
          "jinja2", "yaml", "submitit", "zstandard", "rich.live")  # fmt: skip
AT_ONCE = 3
TIMEOUT_S = 300.0
NOTHING_FOUND_OUT = 70
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Trial:
    """One fork at work on one mutant."""

    mutant: Mutant
    directory: Path
    began: float

    @property
    def output(self) -> Path:
        return self.directory.with_suffix(".txt")


def main(names: list[str]) -> int:
    """Try the mutants whose name begins with one of `names`, all without any; prints one line each."""
    chosen = [mutant for mutant in (UNCHANGED, *MUTANTS) if not names or mutant.name.startswith(tuple(names))]
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()
    failed, waiting, trying = 0, list(reversed(chosen)), dict[int, Trial]()
    with tempfile.TemporaryDirectory(prefix="rollmill-mutants-", ignore_cleanup_errors=True) as base:
        while waiting or trying:
            while waiting and len(trying) < AT_ONCE:
                mutant = waiting.pop()
                trial = Trial(mutant, Path(base, mutant.name), time.monotonic())
                trying[_fork(trial)] = trial
            pid, code = _next_end(trying)
            complaint = mutants.verdict(trying[pid].mutant, code, trying[pid].output.read_text(errors="replace"))
            word = "FAILED" if complaint else "noticed" if trying[pid].mutant.file else "passed"
            print(f"{word} {trying[pid].mutant.name}", flush=True)
            if complaint is not None:
                print(complaint, file=sys.stderr, flush=True)
            failed += complaint is not None
            shutil.rmtree(trying.pop(pid).directory, ignore_errors=True)
    return 1 if failed or not chosen else 0


def _next_end(trying: dict[int, Trial]) -> tuple[int, int]:
    """The process that ended next and its exit code; one that is out of time is killed."""
    pause = threading.Event()
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in trying:
            _kill(pid)  # what its tests left
            return pid, os.waitstatus_to_exitcode(status)
        for late in [pid for pid, trial in trying.items() if time.monotonic() - trial.began > TIMEOUT_S]:
            _kill(late)
        pause.wait(0.02)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _fork(trial: Trial) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    trial.output.touch()
    pid = os.fork()
    if pid:
        return pid
    code = NOTHING_FOUND_OUT
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for standard in (1, 2):
            os.dup2(os.open(trial.output, os.O_WRONLY | os.O_APPEND), standard)
        code = _tried(trial)
    except MutantError as error:
        print(error)
    except BaseException:  # the last boundary of this process, whose output is what the parent shows
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tried(trial: Trial) -> int:
    """pytest's exit code in the copy, whose modules take the place of ours."""
    import pytest

    mutants.copy(trial.directory)
    mutants.apply(trial.mutant, trial.directory)
    os.chdir(trial.directory)
    os.environ.update(mutants.environment(trial.directory))
    sys.path[:] = [str(trial.directory), *(path for path in sys.path if path != str(mutants.REPOSITORY))]
    for name in [name for name in sys.modules if name.partition(".")[0] in mutants.COPIED]:
        del sys.modules[name]
    return pytest.main(mutants.arguments(trial.mutant))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
