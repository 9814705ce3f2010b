"""A plain directory as a sandbox's ground: no isolation at all, the same files and layers."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandbox.bashtext import BASE_ENV, SHELL_ARGV, shell_env
from sandbox.errors import LayerError, SandboxError
from sandbox.flatten import changes, flatten
from sandbox.ground import Entry
from sandbox.protocols import SandboxSpec
from sandbox.scratch import remove_tree
from sandbox.usage import STAGE

_FEW = 64
"""Names in a sandbox's root that are looked at without a thread."""
TOKEN_NAME = "ROLLMILL_SANDBOX"  # noqa: S105 - a variable that marks processes, no secret


class DirectoryGround:
    """One sandbox's directory; its root is `root/` in it, and the shell works inside by its real path.

    Args:
        spec: what was asked for; an image directory is not copied, so only "host" is taken.
        directory: its own, not made yet.
    """

    def __init__(self, spec: SandboxSpec, directory: Path) -> None:
        self._spec, self._directory = spec, directory
        self._stages = 0
        self._began: bytes | None = None

    @property
    def directory(self) -> Path:
        """See `Ground.directory`."""
        return self._directory

    @property
    def spec(self) -> SandboxSpec:
        """See `Ground.spec`."""
        return self._spec

    @property
    def token(self) -> str:
        """See `Ground.token`."""
        return f"{TOKEN_NAME}={self._directory}"

    @property
    def prefix(self) -> str:
        """See `Ground.prefix`."""
        return str(self._directory / "root")

    def workspace(self) -> tuple[str, ...]:
        """The workspace directories by their real paths on this machine."""
        root = self._directory / "root"
        return tuple(str(root / path.lstrip("/")) for path in self._spec.workspace) or (str(root),)

    def prepare(self) -> Entry:
        """Make the directory and copy the layers into it."""
        if self._spec.image != "host":
            raise SandboxError(
                f"image {self._spec.image!r} needs isolation: sandbox=none knows the host alone", boundary="start"
            )
        self._directory.mkdir(mode=0o700)
        root = self._directory / "root"
        root.mkdir()
        root.chmod(0o755)
        try:
            upper = [] if self._spec.upper is None else [self._spec.upper]
            flatten([Path(layer) for layer in (*self._spec.layers, *upper)], root)
        except OSError as error:
            raise SandboxError(f"the layers cannot be copied to {root}: {error}", boundary="start") from error
        if self._spec.upper is None:
            self._began = _fingerprint(root)  # what follows is the sandbox's own change, as everywhere
        made = () if self._spec.upper is not None else (*self.workspace(), str(root / "tmp"))
        for path in made:
            Path(path).mkdir(parents=True, exist_ok=True)
        env = {**shell_env(self._spec.env), "HOME": str(root), TOKEN_NAME: str(self._directory)}
        env["PATH"] = self._spec.env.get("PATH", os.environ.get("PATH", BASE_ENV["PATH"]))
        return Entry(("bash", *SHELL_ARGV), env, str(root))

    def enter(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Entry:
        """See `Ground.enter`; the program is this machine's, and only `cwd` is a path of the sandbox."""
        return Entry(tuple(argv), {**env, TOKEN_NAME: str(self._directory)}, self.prefix + cwd)

    def root(self, pid: int) -> Path:
        """See `Ground.root`."""
        del pid
        return self._directory / "root"

    def untouched(self) -> bool:
        """See `Ground.untouched`; a root of many names is not looked at here."""
        return self._began is not None and _fingerprint(self._directory / "root", _FEW) == self._began

    def trees(self) -> Mapping[bytes, Path]:
        """A copy of the root with the layers' deletions marked; empty where nothing was changed since the start."""
        if self._stages:
            remove_tree(self._directory / f"{STAGE}{self._stages}")  # of the last pack
        self._stages += 1
        stage = self._directory / f"{STAGE}{self._stages}"
        try:
            if self._began is not None and _fingerprint(self._directory / "root") == self._began:
                stage.mkdir(mode=0o700)
                return {b"": stage}
            changes([Path(layer) for layer in self._spec.layers], self._directory / "root", stage)
        except OSError as error:
            raise LayerError(f"the changes cannot be read: {error}", boundary="layers") from error
        return {b"": stage}


def _fingerprint(root: Path, most: int | None = None) -> bytes | None:
    """Of all names below and including the root: two are equal where nothing was changed.

    None where not all of them can be read, or where they are more than `most`.

    A time of change is what its owner cannot set, and the time of writing tells changes within one tick of the clock:
    files begin with that of their layer.
    """
    found = hashlib.blake2b(digest_size=16)
    pending, names = [os.fsencode(root)], 0
    try:
        found.update(_facts(b"", root.lstat()))
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in sorted(itertools.islice(entries, most), key=lambda entry: entry.name):
                    names += 1
                    if names == most:
                        return None
                    status = entry.stat(follow_symlinks=False)
                    found.update(_facts(entry.path, status))
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
    except OSError:
        return None
    return found.digest()


def _facts(path: bytes, of: os.stat_result) -> bytes:
    facts = (of.st_ino, of.st_mode, of.st_size, of.st_nlink, of.st_mtime_ns, of.st_ctime_ns)
    return b"%b\0%b\0" % (path, repr(facts).encode())


def loopback() -> socket.socket:
    """A socket that listens on this machine's loopback, at a port that the kernel chose."""
    made = socket.socket()
    try:
        made.bind(("127.0.0.1", 0))
        made.listen(128)
        made.setblocking(False)
    except BaseException:  # nobody holds it; raised again
        made.close()
        raise
    return made
