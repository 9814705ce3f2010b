"""Plays one run's strikes against the real command: starts it, strikes at journal positions, starts it again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import processes, verdict
from tests.chaos.position import Position
from tests.chaos.schedule import Kind, Second, Signal, Strike
from tests.support import runs

TASKS, GROUP_SIZE = 64, 4
RUN_S = 300.0
"""A run that has not ended by then is a violation."""
LEFT_S = 45.0
"""How long processes that were told to end may take: a worker drains for 20 s, and hands over for 5."""
POLL_S = 0.008
LOOKS = 3
"""Nobody was seen so many times one after the other: amid an exec a process shows neither words nor environment."""
OVERRIDES = ("lease.ttl_s=4", "lease.heartbeat_s=0.5", f"task.limit={TASKS}", f"group_size={GROUP_SIZE}")
NUMBERS: dict[Signal, signal.Signals] = {
    "KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM
}  # fmt: skip


@dataclass
class Landed:
    """A signal that was delivered."""

    kind: Kind
    phase: str
    signal: Signal
    double: bool


@dataclass
class Played:
    """One run's story."""

    landed: list[Landed] = field(default_factory=list)
    missed: int = 0
    starts: int = 0
    wall_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    outcome: dict[str, int] = field(default_factory=dict)


class Play:
    """One run in `base`/run under its strikes."""

    def __init__(self, base: Path, strikes: Sequence[Strike]) -> None:
        self._base, self._run_dir = base, base / "run"
        self._strikes = list(strikes)
        self._position = Position(self._run_dir, TASKS * GROUP_SIZE)
        self._mark = f"{base.name}-{os.getpid()}"
        self._stopped: list[tuple[float, processes.Process]] = []
        self._pause = threading.Event()
        self._played = Played()
        self._began = time.monotonic()
        (base / "tmp").mkdir(parents=True)

    def to_the_end(self) -> Played:
        """Run, strike, run again until the command says that it is done; then judge."""
        try:
            self._command = self._start()
            for strike in self._strikes:
                self._strike(strike)
            while self._alive():
                self._wait()
            self._judge()
        except TimeoutError as error:
            self._played.violations.append(str(error))
        finally:
            self._end_all()
        self._played.wall_s = time.monotonic() - self._began
        return self._played

    # -- the command --------------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        self._played.starts += 1
        environment = {**os.environ, processes.MARK: self._mark, "TMPDIR": str(self._base / "tmp")}
        with (self._base / "output.log").open("ab") as log:
            return subprocess.Popen(
                runs.command(self._run_dir, f"cluster.scratch={self._base / 'node'}", *OVERRIDES),
                cwd=runs.REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip

    def _alive(self) -> bool:
        """Whether the run goes on; a command that ended before the run did is started again, as a person would."""
        code = self._command.poll()
        if code is None:
            return True
        if code == 0:
            return False
        if code in (-signal.SIGKILL, -signal.SIGTERM, 130, 75):
            self._command = self._start()
            return True
        said = (self._base / "output.log").read_text(errors="replace").splitlines()
        raise TimeoutError(f"the command ended with {code}: {said[-1] if said else 'it said nothing'}")

    def _wait(self) -> None:
        if time.monotonic() - self._began > RUN_S:
            raise TimeoutError(f"the run has not ended within {RUN_S:g} s, at {self._position.share():.0%}")
        self._pause.wait(POLL_S)
        now = time.monotonic()
        for due, process in list(self._stopped):
            if due <= now:
                process.send(signal.SIGCONT)
                self._stopped.remove((due, process))

    # -- the strikes --------------------------------------------------------------------------------------------------

    def _strike(self, strike: Strike) -> None:
        while self._alive() and self._position.share() < strike.at:
            self._wait()
        struck = self._hit(strike.kind, strike.phase, strike.signal, strike.stop_s, double=False)
        if strike.second is not None:
            self._second(strike.second, strike.phase, struck)

    def _second(self, second: Second, phase: str, first: processes.Process | None) -> None:
        until = time.monotonic() + (second.pause_s if second.moment == "restarted" else 0.0)
        if second.moment == "restarted" and first is not None:
            while self._alive() and first.send(0) and time.monotonic() < until + 5:
                self._wait()
        while self._alive() and time.monotonic() < until:
            self._wait()
        self._hit(second.kind, phase, second.signal, second.stop_s, double=True)

    def _hit(self, kind: Kind, phase: str, name: Signal, stop_s: float, *, double: bool) -> processes.Process | None:
        """Wait for a process of the kind and send it the signal; None where the run ended without one."""
        while self._alive():
            for process in processes.of_kind(self._command.pid, kind):
                if process.send(NUMBERS[name]):
                    self._played.landed.append(Landed(kind, phase, name, double))
                    if name == "STOP":
                        self._stopped.append((time.monotonic() + stop_s, process))
                    elif kind == "supervisor" and name == "KILL":
                        self._command.wait(10)
                    return process
            self._wait()
        self._played.missed += 1
        return None

    # -- the end ------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        until, nobody = time.monotonic() + LEFT_S, 0
        while nobody < LOOKS and time.monotonic() < until:
            living = processes.marked(self._mark, self._run_dir)
            nobody = 0 if living else nobody + 1
            self._wait()
        if living:
            names = [" ".join(process.command)[-90:] for process in living]
            self._played.violations.append(f"{len(living)} processes are left {LEFT_S:g} s after the end: {names[:3]}")
        self._played.violations += verdict.violations(self._run_dir, TASKS, GROUP_SIZE)
        self._played.outcome = verdict.outcome(self._run_dir)

    def _end_all(self) -> None:
        """Whatever happened, nothing of this run goes on."""
        for _ in range(50):
            living = processes.marked(self._mark, self._run_dir)
            for process in living:
                process.send(signal.SIGKILL)
            if not living:
                break
            self._pause.wait(0.05)
        self._command.wait(10)
