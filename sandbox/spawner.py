"""The spawner process: forks ptys for one worker, reaps them, and clears all away when the worker dies.

A worker's event loop must not fork: starting a bash from a large threaded process is what stalls it. So each worker has
one of these, small and single-threaded. It gets one JSON message a packet over a Unix socket pair and answers with
the pty's master and the write end of the command pipe as file descriptors. It is a child subreaper, so nothing that it
started can slip away to PID 1, and when its socket ends (the worker is gone, however it went) it kills all it started
and removes the directories that it was told of.

Messages in, by "op": spawn and execute (id, argv, env, cwd, token), join and terminal (id, and as sandbox.joining
says), settle and interrupt (pid), kill (pid, token, remove: a directory that goes too where it is small), own (path),
limit (of each process started from then on, by kind; processes: most of them in a sandbox whose namespaces are joined).
Messages out: {"id","pid"} with descriptors (spawn: terminal, command pipe; execute: input, output, report; join: a
socket a channel, output; terminal: as spawn) or {"id","error"}, and {"exit":pid,"status"}.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import ptyprocess

from sandbox.joining import COMMAND_FD, join, join_terminal, listen
from sandbox.leftovers import VARIABLE
from sandbox.preparing import LIMITS, REPORT_FD, WORKERS_SIGNALS, become, limit, prepare, prepare_shell, start_light
from sandbox.procfields import carriers_of, children_of, own_children
from sandbox.scratch import remove_few, remove_tree

MESSAGE_BYTES = 192 * 1024
"""Largest packet; above it a Unix socket's default send buffer refuses."""
CLEAR_DEADLINE_S = 10.0
ROWS, COLUMNS = 50, 200
WORKER_DIED = signal.SIGRTMIN + 7
"""What the kernel sends when the worker dies; other signals (TERM, INT, USR1, USR2) mean the worker."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _is_of_session(pid: int, session: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == session
    return False


def _fork_shell(message: dict[str, Any], pipe_read: int) -> tuple[int, int]:
    child = ptyprocess.PtyProcess.spawn(
        message["argv"], cwd=message["cwd"], env=message["env"], preexec_fn=lambda: prepare_shell(pipe_read),
        dimensions=(ROWS, COLUMNS), pass_fds=(pipe_read,),
    )  # fmt: skip
    master = os.dup(child.fd)
    child.fileobj.close()
    child.closed = True  # otherwise its __del__ would hang up the terminal that was handed on
    return child.pid, master


class Spawner:
    """The process's state: what it started and has not reaped, and the directories that die with the worker."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._started: dict[int, set[int]] = {}  # pid -> children that must be gone too before its exit is told
        self._statuses: dict[int, int] = {}
        self._executed: dict[int, str | None] = {}  # pid -> the token of what must end with it
        self._ending: dict[int, str | None] = {}  # pid that was killed -> the token of what goes with it
        self._removing: dict[int, str | None] = {}  # pid that was killed -> the directory that goes with it
        self._environments: dict[int, dict[str, str]] = {}
        # The terminals' masters, held until their shells are gone: one that is hung up when the worker closes its side
        # ends by itself, before its kill and what goes with that are read; and the last to close one waits for it.
        self._terminals: dict[int, int] = {}
        self._owned: list[Path] = []
        self._processes: int | None = None

    def serve(self, wakeup: int) -> None:
        """Answer until the worker's end of the socket is gone."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        buffer = bytearray(MESSAGE_BYTES)  # one for all: making it is a mapping, a fault and an unmapping each time
        while True:
            for fd, _ in poll.poll():
                if fd == wakeup:
                    if WORKER_DIED in os.read(wakeup, 4096):
                        return
                    self._reap()
                elif size := self._link.recv_into(buffer):
                    self._handle(json.loads(buffer[:size]))
                else:
                    return

    def _handle(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation in ("spawn", "execute"):  # what holds namespaces and could outlive both worker and spawner
            message["env"][VARIABLE] = os.environ.get(VARIABLE, "")
        if operation == "spawn":
            self._spawn(message)
        elif operation == "execute":
            self._execute(message)
        elif operation in ("join", "terminal"):
            self._join(message)
        elif operation == "listen":
            self._listen(message)
        elif operation == "interrupt":
            if message["pid"] in self._started and message["pid"] not in self._statuses:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(message["pid"], signal.SIGINT)
        elif operation == "settle":
            if message["pid"] in self._started:
                self._started[message["pid"]] = set(children_of(message["pid"]))
        elif operation == "kill":
            self._end(message["pid"], message.get("token"), message.get("remove"))
        elif operation == "own":
            self._owned.append(Path(message["path"]))
        elif operation == "limit":
            LIMITS.update({int(kind): value for kind, value in message["limits"].items()})
            self._processes = message["processes"]

    def _spawn(self, message: dict[str, Any]) -> None:
        pipe_read, pipe_write = os.pipe()
        master = -1
        try:
            if message["light"]:
                pid, master = start_light(message, pipe_read, ROWS, COLUMNS)
            else:
                pid, master = _fork_shell(message, pipe_read)
            self._begun(pid, message)
            answer = json.dumps({"id": message["id"], "pid": pid}).encode()
            socket.send_fds(self._link, [answer], [master, pipe_write])
            self._terminals[pid], master = master, -1
        except Exception as error:  # noqa: BLE001 - ptyprocess raises what the child wrote, of any class: the worker is told
            self._send({"id": message["id"], "error": f"{type(error).__name__}: {error}"})
        finally:
            for fd in (pipe_read, pipe_write, master):
                if fd >= 0:
                    os.close(fd)

    def _begun(self, pid: int, message: dict[str, Any]) -> None:
        self._started[pid], self._environments[pid] = set(), message["env"]

    def _execute(self, message: dict[str, Any]) -> None:
        """Fork a program with pipes at its descriptors 0 to 3; whether it could be executed is known at the end."""
        pipes: list[int] = []
        try:
            pipes += (*os.pipe(), *os.pipe(), *os.pipe(), *os.pipe())
            given, give, take, output, told, report, said, complaint = pipes
            pid = os.fork()
            if pid == 0:
                try:
                    become(message, (given, output, report))
                except BaseException as error:  # noqa: BLE001 - a fork of this process must end here, whatever it met
                    os.write(complaint, f"{type(error).__name__}: {error}".encode()[:4096])
                finally:
                    os._exit(127)
            self._begun(pid, message)
            self._executed[pid] = message["token"]
            pipes.remove(complaint)
            os.close(complaint)
            if trouble := os.read(said, 4096):  # at its exec the other end closes
                raise OSError(trouble.decode("utf-8", "replace"))
            socket.send_fds(self._link, [json.dumps({"id": message["id"], "pid": pid}).encode()], [give, take, told])
        except OSError as error:
            self._send({"id": message["id"], "error": str(error)})
        finally:
            for fd in pipes:
                os.close(fd)

    def _join(self, message: dict[str, Any]) -> None:
        """Start a program in the namespaces of a process that runs here."""
        descriptors: list[int] = []
        try:
            if message["pid"] is not None and message["pid"] not in self._started.keys() - self._statuses.keys():
                raise ProcessLookupError("the sandbox has ended")
            start = join if message["op"] == "join" else join_terminal
            pid, descriptors = start(message, children_of, self._prepare_joined if message["pid"] else prepare)
            self._begun(pid, message)
            socket.send_fds(self._link, [json.dumps({"id": message["id"], "pid": pid}).encode()], descriptors)
        except (OSError, ValueError) as error:
            self._send({"id": message["id"], "error": str(error)})
        finally:
            for fd in descriptors:
                os.close(fd)

    def _listen(self, message: dict[str, Any]) -> None:
        """Make a listening socket in the network namespace of a process that runs here."""
        try:
            if message["sandbox"] not in self._started.keys() - self._statuses.keys():
                raise ProcessLookupError("the sandbox has ended")
            descriptor = listen(message["sandbox"], children_of, prepare)
            try:
                socket.send_fds(self._link, [json.dumps({"id": message["id"]}).encode()], [descriptor])
            finally:
                os.close(descriptor)
        except OSError as error:
            self._send({"id": message["id"], "error": str(error)})

    def _prepare_joined(self) -> None:
        """In a child that is about to join a sandbox's user namespace, in which alone its processes are counted."""
        prepare()
        if self._processes is not None:
            limit(resource.RLIMIT_NPROC, self._processes)

    def _end(self, pid: int, token: str | None, remove: str | None) -> None:
        """SIGKILL a started process, its group, and all that carry the token."""
        carriers = self._carriers(token) if token else []  # while all are still where they were started
        if pid in self._started and pid not in self._statuses:
            self._started[pid] |= set(children_of(pid))
            self._ending[pid], self._removing[pid] = token, remove
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            _kill(pid)
        for carrier in carriers:
            _kill(carrier)

    def _carriers(self, token: str) -> list[int]:
        """The carriers of a token: whatever left the program that began with it is a child of this subreaper by now.

        To look at every process of the machine at the end of every shell would cost more than the shell.
        """
        name, _, value = token.partition("=")
        mine = [pid for pid in self._started if self._environments.get(pid, {}).get(name) == value]
        return carriers_of(token, {*mine, *(set(own_children()) - self._started.keys())})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._started:
                self._statuses[pid] = os.waitstatus_to_exitcode(status)
                # Its children are ours by now, but for those that it had reaped itself.
                children = set(own_children())
                self._started[pid] &= children
                if pid in self._ending:
                    for child in self._started[pid]:
                        _kill(child)
                if pid in self._executed:
                    self._started[pid] |= self._end_session(pid, self._executed.pop(pid), children)
            for waiting in filter(None, self._started.values()):
                waiting.discard(pid)
                waiting -= {one for one in waiting if not Path(f"/proc/{one}").exists()}  # others have reaped them
            for ended in [pid for pid in self._statuses if not self._started[pid]]:
                if self._left_anything(ended):
                    continue
                del self._started[ended], self._environments[ended]
                if (master := self._terminals.pop(ended, -1)) >= 0:
                    os.close(master)
                if place := self._removing.pop(ended, None):
                    remove_few(place)
                self._send({"exit": ended, "status": self._statuses.pop(ended)})

    def _left_anything(self, ended: int) -> bool:
        """Whether what was killed had started more in its last moments, which is ours by now; it is killed as well."""
        if (token := self._ending.pop(ended, None)) is None:
            return False
        if left := carriers_of(token, set(own_children()) - self._started.keys()):
            self._started[ended], self._ending[ended] = set(left), token  # these may have, too
            for carrier in left:
                _kill(carrier)
        return bool(left)

    def _end_session(self, session: int, token: str | None, children: set[int]) -> set[int]:
        """SIGKILL what an executed program left, and return it: processes of its session, and carriers of the token.

        Of its session are its launchers' own, such as a process 1 that outlives its monitor.
        """
        left = {pid for pid in children - self._started.keys() if _is_of_session(pid, session)}
        left |= set(self._carriers(token)) if token else set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
        for pid in left:
            _kill(pid)
        return left

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the worker is gone: the next read says so
            self._link.send(json.dumps(message).encode())

    def clear(self) -> None:
        """Kill all that was started, wait until it is gone, remove the owned directories."""
        deadline = time.monotonic() + CLEAR_DEADLINE_S
        while time.monotonic() < deadline:
            for pid in {*self._started, *children_of(os.getpid())}:
                _kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            select.select([], [], [], 0.005)
        for path in self._owned:
            remove_tree(path)


def main() -> None:
    """Entry point: the socket's descriptor is the only argument."""
    # Above every number that a child is given.
    link = socket.socket(fileno=fcntl.fcntl(int(sys.argv[1]), fcntl.F_DUPFD_CLOEXEC, COMMAND_FD + 1))
    os.close(int(sys.argv[1]))
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _libc.prctl(_PR_SET_PDEATHSIG, WORKER_DIED)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (REPORT_FD, COMMAND_FD):
        if number != null:  # held, so that no pipe made later gets a number that a child is given
            os.dup2(null, number, inheritable=False)
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    for number in (signal.SIGCHLD, WORKER_DIED):
        signal.signal(number, lambda *_: None)
    for number in WORKERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    spawner = Spawner(link)
    try:
        spawner.serve(wakeup)
    except OSError as error:
        sys.stderr.write(f"sandbox spawner: {error}\n")
    finally:
        spawner.clear()
