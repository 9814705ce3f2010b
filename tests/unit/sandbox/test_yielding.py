"""What computes in a sandbox for a while yields; a shell that waits does not, and a session is itself again at rest."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from sandbox.usage import families, processes
from sandbox.yielding import NICE, Yielding
from tests.support.waiting import poll


def test_what_spins_yields_and_what_waits_does_not() -> None:
    runs_away = "setsid bash -c 'while :; do :; done & echo $!; wait' & wait"
    with subprocess.Popen(
        ["bash", "-c", runs_away], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as shell:
        try:
            assert shell.stdout is not None
            spinner = int(shell.stdout.readline())
            yielding = Yielding(after_s=0.05)

            def look() -> int:
                table = processes()
                yielding.look(families(table, {shell.pid}), table)
                return os.getpriority(os.PRIO_PROCESS, spinner)

            poll(lambda: look() == NICE, "the spinner is niced")
            assert os.getpriority(os.PRIO_PROCESS, shell.pid) == os.getpriority(os.PRIO_PROCESS, 0)
            group = Path(f"/proc/{shell.pid}/autogroup")
            if group.exists():
                own = Path(f"/proc/{spinner}/autogroup")
                poll(lambda: look() and f"nice {NICE}\n" in own.read_text(), "what has a session of its own too")
                poll(lambda: look() and f"nice {NICE}\n" in group.read_text(), "its session is niced")
                os.kill(spinner, signal.SIGSTOP)
                poll(lambda: look() and "nice 0\n" in group.read_text(), "a session at rest is itself again")
        finally:
            os.kill(spinner, signal.SIGKILL)
            shell.kill()
