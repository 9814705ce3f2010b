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
from sandbox.smalllayers import KnownLayers, Spare, State, facts, outline, set_back
from sandbox.usage import STAGE

_FEW = 64
"""Names in a sandbox's root that are looked at without a thread."""
TOKEN_NAME = "ROLLMILL_SANDBOX"  # noqa: S105 - a variable that marks processes, no secret


class DirectoryGround:
    """One sandbox's directory; its root is `root/` in it, and the shell works inside by its real path.

    Args:
        spec: what was asked for; an image directory is not copied, so only "host" is taken.
        directory: its own, not made yet.
        known: what small layers come to, shared by a worker's sandboxes; one's directory may be taken from there.
    """

    def __init__(self, spec: SandboxSpec, directory: Path, known: KnownLayers | None = None) -> None:
        self._spec, self._directory, self._known = spec, directory, known
        self._stages = 0
        self._began: State | None = None
        self._found = None if known is None else known.find(spec)
        self._spare = None if known is None or self._found is None else known.take(self._found)
        if self._spare is not None:
            self._directory = self._spare.directory

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
        self._refuse_images()
        root = self._make()
        try:
            upper = [] if self._spec.upper is None else [self._spec.upper]
            flatten([Path(layer) for layer in (*self._spec.layers, *upper)], root)
            if self._known is not None and not upper:
                self._known.learn(self._spec.layers, root)
        except OSError as error:
            raise SandboxError(f"the layers cannot be copied to {root}: {error}", boundary="start") from error
        return self._begin(root)

    def prepare_at_once(self) -> Entry | None:
        """See `Ground.prepare_at_once`: where few directories and small files are all that the layers hold."""
        self._refuse_images()
        if (found := self._found) is None:
            return None
        root, spare, self._spare = self._directory / "root", self._spare, None
        try:
            if spare is None:
                self._make()
            for one in found:
                if spare is None or one.content is not None:
                    one.lay(f"{root}/")
                    spare = None if spare is None else Spare(spare.directory, None)
        except OSError as error:
            raise SandboxError(f"the layers cannot be copied to {root}: {error}", boundary="start") from error
        if spare is None or spare.began is None:
            return self._begin(root)
        self._began = spare.began
        return self._entry(root)

    def _refuse_images(self) -> None:
        if self._spec.image != "host":
            raise SandboxError(
                f"image {self._spec.image!r} needs isolation: sandbox=none knows the host alone", boundary="start"
            )

    def _make(self) -> Path:
        self._directory.mkdir(mode=0o700)
        root = self._directory / "root"
        root.mkdir()
        root.chmod(0o755)
        return root

    def _begin(self, root: Path) -> Entry:
        if self._spec.upper is None:
            if self._found is not None:
                set_back(root, self._found)
            self._began = self._state()  # what follows is the sandbox's own change, as everywhere
        return self._entry(root)

    def _entry(self, root: Path) -> Entry:
        known = {one.path for one in self._found or () if one.content is None}
        made = () if self._spec.upper is not None else (*self._spec.workspace, "tmp")
        for path in [path for path in made if path.strip("/") not in known]:
            os.makedirs(root / path.lstrip("/"), exist_ok=True)  # noqa: PTH103
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
        return self._began is not None and self._state(_FEW) == self._began

    def _state(self, most: int | None = None) -> State | None:
        root = self._directory / "root"
        return _fingerprint(root, most) if self._found is None else outline(root, self._found)

    def keeps(self) -> bool:
        """See `Ground.keeps`."""
        return self._known is not None and self._found is not None and not self._known.full

    def hand_on(self) -> bool:
        """See `Ground.hand_on`: as it was, and with nothing of ours beside the root."""
        if self._known is None or self._found is None or self._began is None or not self.untouched():
            return False
        try:
            private = stat.S_IMODE(self._directory.lstat().st_mode) == 0o700
            alone = os.listdir(self._directory) == ["root"]  # noqa: PTH208 - names are all that is wanted
            if private and alone:
                self._known.give(self._found, Spare(self._directory, self._began))
            return private and alone
        except OSError:
            return False

    def trees(self) -> Mapping[bytes, Path]:
        """A copy of the root with the layers' deletions marked; empty where nothing was changed since the start."""
        if self._stages:
            remove_tree(self._directory / f"{STAGE}{self._stages}")  # of the last pack
        self._stages += 1
        stage = self._directory / f"{STAGE}{self._stages}"
        try:
            if self._began is not None and self._state() == self._began:
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
        found.update(repr(facts(os.lstat(pending[0]))).encode())
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in sorted(itertools.islice(entries, most), key=lambda entry: entry.name):
                    names += 1
                    if names == most:
                        return None
                    status = entry.stat(follow_symlinks=False)
                    found.update(b"\0%b\0%b" % (entry.path, repr(facts(status)).encode()))
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
    except OSError:
        return None
    return found.digest()


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
