"""A real Slurm cluster on this machine: brings it up, acts in it as one of its users, breaks it, takes it down."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster import install, processes
from tests.support.cluster.binaries import Binaries
from tests.support.cluster.config import Places
from tests.support.cluster.daemons import Daemons
from tests.support.cluster.errors import ClusterError
from tests.support.cluster.nodes import READY
from tests.support.cluster.owner import AS_ROOT, account_of
from tests.support.cluster.roots import Root
from tests.support.cluster.sdiag import Calls, read_calls
from tests.support.cluster.spec import ClusterSpec
from tests.support.waiting import poll

Ended = subprocess.CompletedProcess[str]


class Cluster:
    """A running cluster; a context manager that takes it down.

    Args:
        spec: what it looks like.
        root: its directory; None: the first that is free.
        keep: leave it running at the end, for people.
    """

    def __init__(self, spec: ClusterSpec | None = None, *, root: Path | None = None, keep: bool = False) -> None:
        self.spec = spec or ClusterSpec()
        self.binaries = Binaries.chosen()
        self.binaries.check(accounting=self.spec.accounting)
        held = Root.first_free() if root is None else Root.at(root)
        if held is None:
            raise ClusterError(f"test cluster: {root} is in use by another process")
        self._root, self._keep = held, keep
        self.places = Places(held.path)
        self._daemons = Daemons(self.spec, self.places, self.binaries)
        self._python: Path | None = None

    def up(self) -> Cluster:
        """Bring it up from nothing; what a killed session left in its directory is ended and removed first."""
        self._daemons.stop()
        self._root.clear()
        try:
            self._daemons.prepare()
            self._daemons.start()
        except BaseException:  # what has come up goes down again; raised again
            self.down(clear=False)
            raise
        return self

    def down(self, *, clear: bool = True) -> None:
        """End every process of it, and remove its directory unless its logs are still of use."""
        self._daemons.stop()
        if clear:
            self._root.clear()
        self._root.release()

    def __enter__(self) -> Cluster:
        return self.up()

    def __exit__(self, *_: object) -> None:
        if self._keep:
            self._root.release()
        else:
            self.down()

    # ---- acting in it

    @property
    def version(self) -> tuple[int, int]:
        """Slurm's major release, as (22, 5)."""
        return self.binaries.version

    def env(self, user: str = "root") -> dict[str, str]:
        """The environment of a login shell of the user's."""
        return {
            "PATH": self.binaries.path,
            "SLURM_CONF": str(self.places.conf),
            "HOME": "/root" if user == "root" and AS_ROOT else str(self.places.share(user)),
            "USER": account_of(user),
            "LOGNAME": account_of(user),
            "LANG": "C.UTF-8",
            "SHELL": "/bin/bash",
        }

    def share(self, user: str) -> Path:
        """The user's own directory (mode 0700) on what plays the shared filesystem."""
        return self.places.share(user)

    def start(
        self,
        user: str,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start a program as the user, in the user's own directory unless told otherwise.

        On one ordinary user's cluster all users are that one; their directories are apart.
        """
        if user != "root" and AS_ROOT:
            more |= {"user": user, "group": user, "extra_groups": []}
        place = cwd or (self.places.root if user == "root" else self.share(user))
        environment = {**self.env(user), **(env or {})}
        process: subprocess.Popen[str] = subprocess.Popen(argv, cwd=place, env=environment, text=True, **more)
        return process

    def run(
        self,
        user: str,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = False,
        stdin: str = "",
    ) -> Ended:
        """Run a program as the user to its end.

        Raises:
            ClusterError: with `check`, it ended with another code than 0.
            subprocess.TimeoutExpired: it did not end in time, and was killed.
        """
        pipe = subprocess.PIPE
        with self.start(user, argv, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                out, err = process.communicate(stdin, timeout=timeout_s)
            except BaseException:  # nobody waits for it any more; raised again
                process.kill()
                raise
        if check and process.returncode:
            raise ClusterError(
                f"{' '.join(map(str, argv))}: exit code {process.returncode}: {err.strip() or out.strip()}"
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def ask(self, *argv: str, user: str = "root") -> str:
        """What a Slurm command prints, without the last line's end."""
        return self.run(user, argv, check=True).stdout.strip()

    @property
    def python(self) -> Path:
        """An interpreter with this package that every user can run; the copy is made at the first use."""
        if self._python is None:
            self._python = install.install(self.places.root / "opt")
        return self._python

    def rollmill(self, user: str, *arguments: object, timeout_s: float = 120, **more: Any) -> Ended:
        """Run the real command line as the user, from the copy, in the user's own directory."""
        command = [str(self.python.with_name("rollmill")), *map(str, arguments)]
        return self.run(user, command, timeout_s=timeout_s, **more)

    # ---- jobs

    def submit(self, user: str, script: str, *options: str, env: Mapping[str, str] | None = None) -> str:
        """`sbatch` of a script's text, without output files; the job's id (of a het job the leader's)."""
        argv = ["sbatch", "--parsable", "--output=/dev/null", *options]
        return self.run(user, argv, stdin=script, env=env, check=True).stdout.strip().partition(";")[0]

    def states(self, job: str) -> dict[str, str]:
        """State of each component and step by its id, from the accounting: the newest record of each."""
        rows = self.ask("sacct", "-nPj", job, "-o", "JobID,State").splitlines()
        return {name: state.partition(" ")[0] for name, _, state in (row.partition("|") for row in rows)}

    def queued(self, job: str) -> dict[str, str]:
        """State of each component by its id, as long as squeue shows it."""
        rows = self.ask("squeue", "-ht", "all", "-o", "%i %T").splitlines()
        found = dict(row.split() for row in rows)
        return {name: state for name, state in found.items() if name == job or name.startswith((f"{job}+", f"{job}_"))}

    def await_state(self, job: str, *wanted: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until squeue shows every component of the job in one of these states."""

        def there() -> dict[str, str]:
            found = self.queued(job)
            return found if found and set(found.values()) <= set(wanted) else {}

        return poll(there, f"job {job} is {' or '.join(wanted)}", timeout_s, 0.1)

    def job_processes(self) -> set[int]:
        """Processes of this cluster's jobs that still run, sandboxes below them included."""
        return {pid for pid in processes.of_jobs(self.places.conf) if processes.running(pid)}

    def await_no_processes(self, timeout_s: float = 60) -> None:
        """Wait until nothing of any job runs on any node; the error names what is left."""
        try:
            poll(lambda: not self.job_processes(), "no process of a job is left", timeout_s, 0.1)
        except AssertionError as error:
            left = "; ".join(processes.described(pid) for pid in sorted(self.job_processes()))
            raise AssertionError(f"{error}: {left}") from None

    def settle(self, timeout_s: float = 60) -> None:
        """End every job and what escaped from one, bring lost nodes back, and wait until all is idle.

        Without control groups Slurm finds a job's processes by their parents, and misses one whose parent ends between
        its fork and the search: such a process is of no test that comes after.
        """
        jobs = self.ask("squeue", "-ho", "%A").split()
        if jobs:
            self.run("root", ["scancel", *sorted(set(jobs))])
            poll(lambda: not self.ask("squeue", "-ho", "%A"), "all jobs end", timeout_s, 0.1)
        for node in self.spec.nodes:
            self._daemons.start_node(node)
        poll(self._daemons.all_idle, "all nodes are idle", timeout_s, 0.1)
        processes.kill(self.job_processes())

    # ---- what it costs

    def rpcs(self) -> Calls:
        """Calls that the controller served since the last reset, by user and by kind."""
        return read_calls(self.ask("sdiag"))

    def database_rpcs(self) -> Calls:
        """Calls that the database daemon served since the last reset: sacct's, which the controller does not see."""
        return read_calls(self.ask("sacctmgr", "show", "stats"))

    def reset_rpcs(self) -> None:
        """Count from nothing again, at the controller and at the database daemon."""
        self.ask("sdiag", "--reset")
        if self.spec.accounting:
            self.ask("sacctmgr", "-i", "clear", "stats")

    # ---- breaking it

    def kill_node(self, node: str) -> None:
        """The node loses its power: slurmd, step daemons and all that ran there are gone at once."""
        self._daemons.kill_node(node)

    def start_node(self, node: str, timeout_s: float = 60) -> None:
        """The node comes back; returns when it takes jobs."""
        self._daemons.start_node(node)
        self.await_node(node, *READY, timeout_s=timeout_s)

    def node_state(self, node: str) -> str:
        """The node's state: `idle`, `mixed`, `down*` (the star: it does not answer), ..."""
        return self._daemons.node_states().get(node, "")

    def await_node(self, node: str, *wanted: str, timeout_s: float = 60) -> None:
        """Wait until the node is in one of these states (`down*` 25 s after it was killed)."""
        poll(lambda: self.node_state(node) in wanted, f"{node} is {' or '.join(wanted)}", timeout_s, 0.1)

    @contextlib.contextmanager
    def changed(self, **knobs: Any) -> Iterator[None]:
        """Another configuration for a while: fields of ClusterSpec, but for nodes, users and accounting."""
        before = self.spec
        self._configure(dataclasses.replace(before, **knobs))
        try:
            yield
        finally:
            self._configure(before)

    def _configure(self, spec: ClusterSpec) -> None:
        if (spec.nodes, spec.users, spec.accounting) != (self.spec.nodes, self.spec.users, self.spec.accounting):
            raise ClusterError("test cluster: nodes, users and accounting cannot change while it runs")
        self.spec = spec
        self._daemons.write(spec)
        self.ask("scontrol", "reconfigure")

    def tails(self, lines: int = 15) -> str:
        """The last lines of Slurm's daemons' logs, for a failed test's report."""
        logs = sorted((self.places.root / "log").glob("slurm*.log"))
        return "\n".join(f"--- {log.stem}\n{self._daemons.tail(log.stem, lines)}" for log in logs)
