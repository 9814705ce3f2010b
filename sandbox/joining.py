"""Starting a process in a sandbox that runs already, not through its shell: the spawner's child joins its namespaces.

The child takes the namespaces of the sandbox's process 1 in one step (setns on a pidfd, Linux >= 5.8; one by one would
not do: who is in the inner user namespace already may not enter a mount namespace of the outer one), and gives up every
capability, its core and its other descriptors before anything of the agent's can see it. No mount is added to the
sandbox: a directory of ours reaches the process as a detached read-only mount behind a descriptor, from which no ".."
leads anywhere. Sockets to the process are made here, connected, and their names removed: nobody else can connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

CHANNELS = 2
"""Listening sockets that the process gets, from descriptor 3 on; the shared directory comes after them."""
FIRST_FD = 3
COMMAND_FD = 9
"""Descriptor of the command pipe in a shell."""
_LONGEST_WALK = 256
_LIMITS = 16  # kinds of resource limits
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
_NEWUSER, _NEWPID, _NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
_ALL = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
_SYS_OPEN_TREE, _SYS_MOUNT_SETATTR = 428, 442  # the same on every architecture
_OPEN_TREE_CLONE, _AT_EMPTY_PATH = 1, 0x1000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 24, 38, 47
_libc = ctypes.CDLL(None, use_errno=True)


Become = Callable[[dict[str, Any], list[int], int | None], NoReturn]
"""What the child does in the end: the message, its descriptors, and that of the shared directory."""


def join(
    message: dict[str, Any], children_of: Callable[[int], list[int]], prepare: Callable[[], object]
) -> tuple[int, list[int]]:
    """Fork the process; its id, and the descriptors that its user gets: one connected socket a channel, its output.

    Args:
        message: argv, env, cwd; pid (of the sandbox's outermost process, or None where it has no namespaces); share (a
            directory to hand over, or None); directory (where the sockets have names for a moment).
        children_of: process ids of the children of one.
        prepare: umask and signals of a child.

    Raises:
        OSError: a namespace cannot be joined, or the sandbox is gone.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        for number in range(CHANNELS):
            listening, connected = _connected_pair(message["directory"], f"k{os.getpid()}-{number}")
            ours.append(connected)
            theirs.append(listening)
        output, write_output = os.pipe()
        ours.append(output)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        theirs += (write_output, null)
        return _fork(message, children_of, prepare, theirs, _become), ours
    except BaseException:  # whatever ended the call, nobody holds these descriptors; raised again
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)


def join_terminal(
    message: dict[str, Any], children_of: Callable[[int], list[int]], prepare: Callable[[], object]
) -> tuple[int, list[int]]:
    """Fork a process on a terminal of its own; its id, the terminal's master, and the write end of its command pipe.

    Args:
        message: as of `join`, without share and directory; also rows, columns, and plain (no echo, no changes to what
            passes: as a shell is driven; otherwise the modes that a person's terminal has).
        children_of: process ids of the children of one.
        prepare: umask and signals of a child.

    Raises:
        OSError: a namespace cannot be joined, or the sandbox is gone.
    """
    master, slave = os.openpty()
    pipe_read, pipe_write = os.pipe()
    try:
        if message["plain"]:
            make_plain(slave)
        termios.tcsetwinsize(slave, (message["rows"], message["columns"]))
        theirs = [slave, pipe_read]
        return _fork(message, children_of, prepare, theirs, _become_on_terminal), [master, pipe_write]
    except BaseException:  # as above
        os.close(master)
        os.close(pipe_write)
        raise
    finally:
        os.close(slave)
        os.close(pipe_read)


def listen(
    sandbox: int, children_of: Callable[[int], list[int]], prepare: Callable[[], object], backlog: int = 128
) -> int:
    """A socket that listens on a sandbox's own loopback, at a port that the kernel chose; nothing of it runs in there.

    A socket belongs to the network namespace in which it was made, whoever holds it: a child makes it there, hands it
    over and ends.

    Args:
        sandbox: the pid of its outermost process.
        children_of: process ids of the children of one.
        prepare: umask and signals of the child.
        backlog: connections that may wait to be accepted.

    Raises:
        OSError: a namespace cannot be joined, or the sandbox is gone.
    """
    here, there = socket.socketpair()
    with here, there:
        if os.fork() == 0:
            _be_listener(sandbox, children_of, prepare, there, backlog)
        there.close()
        said, descriptors, _, _ = socket.recv_fds(here, 4096, 1)
    if not descriptors:
        raise OSError(said.decode("utf-8", "replace") or "the child ended")
    return descriptors[0]


def _be_listener(
    sandbox: int, children_of: Callable[[int], list[int]], prepare: Callable[[], object], tell: socket.socket,
    backlog: int,
) -> NoReturn:  # fmt: skip
    """In the fork: join, make the socket, send it, and end."""
    try:
        prepare()
        _enter(sandbox, _first_process(sandbox, children_of), None)
        with socket.socket() as made:
            made.bind(("127.0.0.1", 0))
            made.listen(backlog)
            socket.send_fds(tell, [b"made"], [made.fileno()])
    except BaseException as error:  # noqa: BLE001 - a fork of this process must end here, whatever it met
        with contextlib.suppress(OSError):
            tell.send(f"{type(error).__name__}: {error}"[:1000].encode())
    finally:
        os._exit(0)


def make_plain(terminal: int) -> None:
    """Switch off what a terminal does with what passes: echo, flow control, changes of line ends."""
    modes = termios.tcgetattr(terminal)
    modes[0] &= ~(termios.IXON | termios.IXOFF | termios.ICRNL)
    modes[1] &= ~termios.OPOST
    modes[3] &= ~(termios.ECHO | termios.ECHONL | termios.ECHOCTL)
    termios.tcsetattr(terminal, termios.TCSANOW, modes)


def _fork(
    message: dict[str, Any], children_of: Callable[[int], list[int]], prepare: Callable[[], object],
    theirs: list[int], become: Become,
) -> int:  # fmt: skip
    """Fork the child; the process id that its program has."""
    told, tell = os.pipe()
    with os.fdopen(told, "rb", buffering=0) as said:
        try:
            if os.fork() == 0:
                _be_child(message, children_of, prepare, theirs, tell, become)
        finally:
            os.close(tell)
        answer = json.loads(said.read(4096) or b'{"error": "the child ended"}')
    if "error" in answer:
        raise OSError(answer["error"])
    return int(answer["pid"])


def _be_child(
    message: dict[str, Any], children_of: Callable[[int], list[int]], prepare: Callable[[], object],
    theirs: list[int], tell: int, become: Become,
) -> NoReturn:  # fmt: skip
    """In the fork: join, fork again, and end; or, without namespaces, become the program itself.

    Nothing of the agent's can stop or see this process, so its parent may wait for its answer. Not so for its child,
    which is in the sandbox: of what that meets its output tells.
    """
    try:
        prepare()
        share = None
        if message["pid"] is None:
            os.write(tell, json.dumps({"pid": os.getpid()}).encode())
        else:
            share = _enter(message["pid"], _first_process(message["pid"], children_of), message.get("share"))
            inner = os.fork()
            if inner:
                os.write(tell, json.dumps({"pid": inner}).encode())
                os._exit(0)
            os.close(tell)
        become(message, theirs, share)
    except BaseException as error:  # noqa: BLE001 - a fork of this process must end here, whatever it met
        text = f"{type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(OSError):
            os.write(tell, json.dumps({"error": text}).encode())
    finally:
        os._exit(127)


def _become(message: dict[str, Any], theirs: list[int], share: int | None) -> NoReturn:
    """The program itself, in a session of its own."""
    os.setsid()
    held = [fcntl.fcntl(one, fcntl.F_DUPFD, 64) for one in (*theirs, *([] if share is None else [share]))]
    listening, (output, null), shared = held[:CHANNELS], held[CHANNELS : CHANNELS + 2], held[CHANNELS + 2 :]
    wanted = [null, output, output, *listening, *shared]
    for number, descriptor in enumerate(wanted):
        os.dup2(descriptor, number)
    os.closerange(len(wanted), 4096)
    _execute(message)


def _become_on_terminal(message: dict[str, Any], theirs: list[int], share: int | None) -> NoReturn:
    """The program itself, in a session of its own whose terminal this is; the command pipe is at COMMAND_FD."""
    del share
    os.setsid()
    slave, commands = (fcntl.fcntl(one, fcntl.F_DUPFD, 64) for one in theirs)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(slave, number)
    os.closerange(3, 64)
    if message["plain"]:
        os.dup2(commands, COMMAND_FD)
    os.closerange(64, 4096)
    _execute(message)


def _execute(message: dict[str, Any]) -> NoReturn:
    try:
        os.chdir(message["cwd"])
    except OSError:  # the agent removed it
        os.chdir("/")
    try:
        os.execvpe(message["argv"][0], message["argv"], message["env"])  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(2, f"cannot start {message['argv'][0]}: {error.strerror}\n".encode())
    os._exit(127)


def _connected_pair(directory: str, name: str) -> tuple[int, int]:
    """A listening socket and one that is connected to it, under a name that is gone again; of any length of path."""
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    path = f"/proc/self/fd/{place}/{name}"
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as connected:
        try:
            listening.bind(path)
            listening.listen(1)
            connected.connect(path)
        finally:
            with contextlib.suppress(OSError):
                Path(path).unlink()
            os.close(place)
        return listening.detach(), connected.detach()


def _first_process(top: int, children_of: Callable[[int], list[int]]) -> int:
    """The sandbox's process 1, below its outermost process: it alone is first in the innermost process namespace."""
    found, depth, waiting, seen = 0, 1, [top], 0
    while waiting and seen < _LONGEST_WALK:
        pid = waiting.pop(0)
        seen += 1
        waiting += children_of(pid)
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
            if numbers[-1] == "1" and len(numbers) > depth:
                found, depth = pid, len(numbers)
    if not found:
        raise OSError("the sandbox has no process 1: it has ended")
    return found


def _enter(top: int, first: int, share: str | None) -> int | None:
    """Take the namespaces, root and limits of process `first`; a descriptor of the shared directory's mount.

    Raises:
        OSError: the kernel refuses, or the process is gone.
    """
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):  # until exec: this memory is the spawner's
        raise OSError(ctypes.get_errno(), "prctl")
    outer, inner = os.pidfd_open(top), os.pidfd_open(first)
    root = os.open(f"/proc/{first}/root", os.O_PATH | os.O_DIRECTORY)
    same_user = os.path.samefile(f"/proc/{top}/ns/user", f"/proc/{first}/ns/user")  # noqa: PTH121 - a magic link
    limits = {number: resource.prlimit(first, number) for number in range(_LIMITS)}
    signal.pidfd_send_signal(inner, 0)  # it is still there: what was read above is its own
    _setns(outer, _NEWUSER | _NEWNS)
    mounted = None if share is None else _detached_mount(share)
    _setns(inner, _ALL if same_user else _ALL | _NEWUSER)
    os.fchdir(root)
    os.chroot(".")
    os.chdir("/")
    for number, pair in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(number, pair)
    _drop_privileges()
    return mounted


def _setns(descriptor: int, kinds: int) -> None:
    if _libc.setns(descriptor, kinds):
        number = ctypes.get_errno()
        raise OSError(number, f"setns({kinds:#x}): {os.strerror(number)}")


def _detached_mount(path: str) -> int:
    """A read-only mount of a directory that is in no namespace: reached through the descriptor alone."""
    mounted = _libc.syscall(_SYS_OPEN_TREE, -100, path.encode(), _OPEN_TREE_CLONE)
    if mounted < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"open_tree {path}: {os.strerror(number)}")
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    if _libc.syscall(_SYS_MOUNT_SETATTR, mounted, b"", _AT_EMPTY_PATH, attributes, ctypes.sizeof(attributes)):
        number = ctypes.get_errno()
        raise OSError(number, f"mount_setattr: {os.strerror(number)}")
    return int(mounted)


def _drop_privileges() -> None:
    """No capability now or later, and no way to gain one by exec."""
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "capset")
