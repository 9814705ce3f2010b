"""Starts and ends the daemons of a test cluster, each known by its pid file and its SLURM_CONF."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.cluster import config, processes
from tests.support.cluster.binaries import Binaries
from tests.support.cluster.config import Places
from tests.support.cluster.errors import ClusterError
from tests.support.cluster.nodes import read_states
from tests.support.cluster.owner import AS_ROOT, ME, SERVICE, give
from tests.support.cluster.spec import NAME, ClusterSpec
from tests.support.waiting import poll

START_S = 30.0
FIRST_PORT, LAST_PORT = 20_000, 32_000  # below what the kernel gives to outgoing connections
_AS_SERVICE = [f"--user={SERVICE}"] if AS_ROOT else []


def free_ports(number: int) -> range:
    """So many ports in a row that nobody listens on."""
    for _ in range(200):
        first = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        ports = range(first, first + number)
        if all(_free(port) for port in ports):
            return ports
    raise ClusterError(f"test cluster: found no {number} free ports between {FIRST_PORT} and {LAST_PORT}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


class Daemons:
    """munged, mariadbd, slurmdbd, slurmctld and one slurmd a node, below one root.

    Args:
        spec: what the cluster looks like.
        places: where it lies.
        binaries: whose programs it runs.
    """

    def __init__(self, spec: ClusterSpec, places: Places, binaries: Binaries) -> None:
        self.spec, self.places, self.binaries = spec, places, binaries
        self.env = {
            "SLURM_CONF": str(places.conf),
            "PATH": binaries.path,
            "HOME": "/",
            "LANG": "C.UTF-8",
            # mariadbd removes at its start what looks like its own in there, another cluster's mariadbd's too.
            "TMPDIR": str(places.root / "tmp"),
        }
        self._host = socket.gethostname().partition(".")[0]
        self._ports: range | None = None

    def write(self, spec: ClusterSpec) -> None:
        """Write the configuration; the ports stay what they were."""
        self.spec = spec
        ports = self._ports = self._ports or free_ports(2 + len(spec.nodes))
        etc = self.places.conf.parent
        conf = config.slurm_conf(spec, self.places, host=self._host, ports=ports, binaries=self.binaries)
        _replace(etc / "slurm.conf", conf)
        _replace(etc / "gres.conf", config.gres_conf(spec, self.places))
        _replace(etc / "cgroup.conf", config.cgroup_conf(self.binaries.version))
        text = config.slurmdbd_conf(self.places, host=self._host, port=ports[1], binaries=self.binaries)
        _replace(etc / "slurmdbd.conf", text, mode=0o600)
        give(etc / "slurmdbd.conf", SERVICE)

    def prepare(self) -> None:
        """Make the users, the directories, the munge key and the configuration."""
        if AS_ROOT:
            _ensure_users(self.spec.users)
        root = self.places.root
        for part in ("etc", "log", "run", "munge", "spool/ctld", "mysql", "tmp", "dev", "share"):
            (root / part).mkdir(parents=True, exist_ok=True)
            (root / part).chmod(0o755)
        root.chmod(0o755)
        for part in ("log", "run", "spool/ctld", "mysql", "tmp"):
            give(root / part, SERVICE)
        (root / "mysql").chmod(0o700)  # the database knows no passwords: who reaches its socket is its master
        for user in self.spec.users:
            self.places.share(user).mkdir(exist_ok=True)
            self.places.share(user).chmod(0o700)
            give(self.places.share(user), user)
        for gpu in range(self.spec.gpus):
            link = root / "dev" / f"fakegpu{gpu}"
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        key = root / "etc" / "munge.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(1024))
        self.write(self.spec)

    def start(self) -> None:
        """Start everything; returns when all nodes are idle.

        Raises:
            ClusterError: something did not come up; the message ends with its log.
        """
        self._start_munged()
        if self.spec.accounting:
            self._start_database()
            self._start_accounting()
        self.start_controller()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.start_node, self.spec.nodes))
        self._await("slurmctld", self.all_idle)

    def _start_munged(self) -> None:
        places = self.places
        self._call(
            "munged",
            "--force",
            f"--key-file={places.root}/etc/munge.key",
            f"--socket={places.munge_socket}",
            f"--pid-file={places.pid('munged')}",
            f"--log-file={places.log('munged')}",
            f"--seed-file={places.root}/munge/munge.seed",
            "--num-threads=10",
        )

    def _start_database(self) -> None:
        data = self.places.root / "mysql"
        if not (data / "mysql").is_dir():
            self._call(
                "mariadb-install-db",
                "--no-defaults",
                *_AS_SERVICE,
                f"--datadir={data}",
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
                "--innodb-log-file-size=8M",
            )
        log = self.places.log("mariadbd")
        server = self._spawn(
            "mariadbd",
            "--no-defaults",
            *_AS_SERVICE,
            f"--datadir={data}",
            f"--socket={self.places.database_socket}",
            "--skip-networking",
            f"--pid-file={data}/mariadbd.pid",
            "--innodb-log-file-size=8M",
            "--innodb-buffer-pool-size=64M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900",
            "--innodb-doublewrite=0",
            "--performance-schema=0",
            "--skip-log-bin",
            log=log,
        )
        self.places.pid("mariadbd").write_text(str(server))
        self._await("mariadbd", lambda: b"ready for connections" in log.read_bytes())

    def _start_accounting(self) -> None:
        self._call("slurmdbd", env={"MYSQL_UNIX_PORT": str(self.places.database_socket)})
        self._await("slurmdbd", lambda: self._succeeds(["sacctmgr", "-n", "list", "cluster"]))
        if not AS_ROOT:  # `load` knows the user from these alone; SlurmUser may make them unknown
            self._call("sacctmgr", "-i", "add", "cluster", NAME, log="slurmdbd")
            self._call("sacctmgr", "-i", "add", "user", ME, "account=root", "adminlevel=Administrator", log="slurmdbd")
        file = self.places.root / "etc" / "accounts"
        file.write_text(config.accounts(self.spec))
        self._call("sacctmgr", "-i", "load", f"file={file}", "clean", log="slurmdbd")

    def start_controller(self) -> None:
        self._call("slurmctld")

    def start_node(self, node: str) -> None:
        """Start the node's slurmd, if it does not run."""
        daemon = f"slurmd-{node}"
        if processes.read_pid(self.places.pid(daemon), self.places.conf) is None:
            (self.places.root / "spool" / node).mkdir(exist_ok=True)
            self._call("slurmd", "-N", node, *self.binaries.step_daemon, log=daemon)

    def kill_node(self, node: str) -> None:
        """SIGKILL to the node's slurmd, its step daemons, and everything that ran below them."""
        conf = self.places.conf
        slurmd = processes.read_pid(self.places.pid(f"slurmd-{node}"), conf)
        victims = {slurmd} if slurmd else set()
        # Until nothing of the node is left: what starts between two looks is found by the next.
        while victims:
            processes.kill(victims, signal.SIGSTOP)
            below = processes.descendants(victims) - victims
            processes.kill(victims | below)
            steps = processes.step_daemons([self.places.log(f"slurmd-{node}")])
            tasks = {pid for pid, env in processes.of_cluster(conf).items() if env.get("SLURMD_NODENAME") == node}
            victims = {pid for pid in steps | tasks | below if processes.running(pid)}
        self.places.pid(f"slurmd-{node}").unlink(missing_ok=True)

    def stop(self) -> None:
        """End what is still there: jobs, nodes, controller, databases. Safe to call at any time, and again."""
        conf, places = self.places.conf, self.places
        if not places.conf.exists():
            return
        if processes.read_pid(places.pid("slurmctld"), conf):
            with contextlib.suppress(AssertionError, subprocess.SubprocessError):
                self._cancel_everything()
        nodes = [path.stem for path in (places.root / "run").glob("slurmd-*.pid")]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._stop, nodes))
        logs = (places.root / "log").glob("slurmd-*.log")
        processes.kill(processes.step_daemons(logs) | processes.of_jobs(conf))
        for daemon in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            self._stop(daemon)

    def _cancel_everything(self) -> None:
        jobs = self._output(["squeue", "-ho", "%A"]).split()
        if jobs:
            self._succeeds(["scancel", *sorted(set(jobs))])
            poll(lambda: not self._output(["squeue", "-ho", "%A", "-t", "R,CG,S"]), "jobs end", 10, 0.1)

    def _stop(self, daemon: str) -> None:
        path = self.places.pid(daemon)
        pid = processes.read_pid(path, self.places.conf)
        if pid is not None:
            processes.stop(pid, 15)
        path.unlink(missing_ok=True)

    def all_idle(self) -> bool:
        """Whether every node can take jobs and none has one."""
        states = self.node_states()
        return len(states) == len(self.spec.nodes) and set(states.values()) == {"idle"}

    def node_states(self) -> dict[str, str]:
        """State of every node, as nodes.py words it; empty while the controller does not answer."""
        return read_states(self._output(["scontrol", "-o", "show", "node"]))

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**self.env, **(env or {})}

    def _call(self, program: str, *arguments: str, env: Mapping[str, str] | None = None, log: str = "") -> None:
        """Run a program that goes to the background by itself, or ends soon."""
        out = self.places.root / "log" / f"{log or program}.out"
        with out.open("ab") as stream:
            ended = subprocess.run(
                [self.binaries.find(program), *arguments],
                cwd=self.places.root,
                env=self._environment(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                timeout=60,
            )
        if ended.returncode:
            raise ClusterError(f"test cluster: {program} ended with {ended.returncode}: {self.tail(log or program)}")

    def _spawn(self, program: str, *arguments: str, log: Path) -> int:
        with log.open("ab") as stream:
            return subprocess.Popen(
                [self.binaries.find(program), *arguments],
                cwd=self.places.root,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            ).pid

    def _output(self, argv: Sequence[str]) -> str:
        return subprocess.run(
            [self.binaries.find(argv[0]), *argv[1:]], env=self.env, capture_output=True, text=True, timeout=20
        ).stdout

    def _succeeds(self, argv: Sequence[str]) -> bool:
        command = [self.binaries.find(argv[0]), *argv[1:]]
        return subprocess.run(command, env=self.env, capture_output=True, timeout=20).returncode == 0

    def _await(self, daemon: str, ready: Callable[[], bool]) -> None:
        try:
            poll(ready, f"{daemon} is ready", START_S, 0.05)
        except AssertionError as error:
            raise ClusterError(f"test cluster: {error}: {self.tail(daemon)}") from error

    def tail(self, daemon: str, lines: int = 15) -> str:
        """The last lines that a daemon wrote."""
        text = ""
        for path in (self.places.root / "log" / f"{daemon}.out", self.places.log(daemon)):
            if path.exists():
                text += path.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def _replace(path: Path, text: str, mode: int = 0o644) -> None:
    temporary = path.with_suffix(".new")
    temporary.touch(mode=mode)
    temporary.chmod(mode)
    temporary.write_text(text)
    temporary.replace(path)


def _ensure_users(users: Mapping[str, str]) -> None:
    for user in ("slurm", *users):
        try:
            pwd.getpwnam(user)
        except KeyError:
            kind = ["-r", "-s", "/usr/sbin/nologin"] if user == "slurm" else ["-M", "-s", "/bin/bash"]
            useradd = shutil.which("useradd", path=os.defpath + ":/usr/sbin")
            if useradd is None:
                raise ClusterError(f"test cluster: user {user} is not there and useradd is missing") from None
            subprocess.run([useradd, "-U", *kind, user], check=True, capture_output=True)
