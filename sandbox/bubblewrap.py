"""The bubblewrap backend: user namespace, kernel overlays and bwrap, for root and for ordinary users alike."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sandbox.bashtext import BASE_ENV, SHELL_ARGV, shell_env
from sandbox.errors import LayerError, SandboxError, SandboxUnavailable
from sandbox.flatten import changed, flatten
from sandbox.ground import Entry, Ground
from sandbox.hostroot import build_skeleton
from sandbox.mountplan import MERGED, Mount, Shown, enter_argv, plan_overlays
from sandbox.pristine import Pristine
from sandbox.probe import probe_isolation, require_programs
from sandbox.protocols import SandboxSpec
from sandbox.pty_backend import PtyBackend
from sandbox.scratch import remove_tree
from sandbox.uppertree import MOVED
from sandbox.usage import STAGE, written

log = logging.getLogger(__name__)

COPY_BYTES = 4 * 1024**3
"""The most that a sandbox's copy of image and layers may take, where there are no overlays."""
MOUNT_POINTS = ("usr", "proc", "dev")


class BubblewrapGround:
    """One sandbox's directory and namespaces.

    Args:
        spec: what was asked for.
        directory: its own, not made yet.
        skeleton: the host image's lowest layer.
        processes: most processes in it, where the kernel can hold that.
        copied: image and layers are copied, because the kernel mounts no overlay here; the host's /usr is then shown as
            it is, read-only.
    """

    token = None
    prefix = ""

    def __init__(
        self, spec: SandboxSpec, directory: Path, skeleton: Path, processes: int | None = None, *, copied: bool = False
    ) -> None:
        self._spec, self._directory, self._skeleton, self._processes = spec, directory, skeleton, processes
        self._mounts: Sequence[Mount] = ()
        self._copied, self._stages = copied, 0
        self._pristine: Pristine | None = None
        self._given = (0, 0)

    @property
    def directory(self) -> Path:
        """See `Ground.directory`."""
        return self._directory

    @property
    def spec(self) -> SandboxSpec:
        """See `Ground.spec`."""
        return self._spec

    def workspace(self) -> tuple[str, ...]:
        """See `Ground.workspace`."""
        return self._spec.workspace

    def prepare(self) -> Entry:
        """Make uppers, work directories and the links to the lowers."""
        self._lay()
        return self._enter(("/bin/bash", *SHELL_ARGV), shell_env(self._spec.env), "/", alone=False)

    def prepare_at_once(self) -> Entry | None:
        """See `Ground.prepare_at_once`: mounts have directories of their own to be made."""
        return None

    def keeps(self) -> bool:
        """See `Ground.keeps`: an upper is one sandbox's alone."""
        return False

    def hand_on(self) -> bool:
        """See `Ground.hand_on`."""
        return False

    def enter(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Entry:
        """See `Ground.enter`."""
        return self._enter(argv, env, cwd, alone=True)

    def _enter(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, *, alone: bool) -> Entry:
        line = enter_argv(
            self._directory, self._mounts, env, self._spec.limits.shm_mib, argv, cwd=cwd, alone=alone,
            processes=self._processes,
        )  # fmt: skip
        return Entry(tuple(line), {"PATH": os.environ.get("PATH", "") + ":" + BASE_ENV["PATH"]}, "/", given=self._given)

    def _lay(self) -> None:
        """Make what the sandbox's root is made of."""
        layers = [_real_directory(layer, "layer") for layer in self._spec.layers]
        if self._spec.image != "host":
            _real_directory(self._spec.image, "image")
        with_usr = [one for one in layers if _holds_usr(one)]
        overlays = plan_overlays(self._spec.image, self._skeleton, layers, with_usr)
        if self._copied and self._spec.image == "host" and with_usr:
            raise SandboxError(
                f"layer {with_usr[0]} changes /usr, and without overlays the host's is shown as it is: use an image, "
                "or a node whose kernel mounts overlays for this user", boundary="start", path=str(with_usr[0]),
            )  # fmt: skip
        self._directory.mkdir(mode=0o700)
        if self._copied:
            host = self._spec.image == "host"
            self._copy([self._skeleton if host else Path(self._spec.image), *layers])
            self._mounts = [Shown("/usr", f"{MERGED}/usr")] if host else []
            return
        for name in ("lower", "upper", "wk", MERGED):
            (self._directory / name).mkdir(mode=0o755)
        for overlay in overlays:
            for made in (overlay.upper, overlay.work):
                (self._directory / made).mkdir()
                (self._directory / made).chmod(0o755)  # an upper's mode is the mode of the mount's root
            for link, target in overlay.lowers.items():
                (self._directory / link).symlink_to(target)
        if self._spec.upper is not None:
            self._take_upper(Path(self._spec.upper))
        self._mounts = overlays

    def _copy(self, lowers: Sequence[Path]) -> None:
        """Make the root a plain directory."""
        root = self._directory / MERGED
        root.mkdir()
        root.chmod(0o755)
        try:
            flatten(lowers, root, max_bytes=COPY_BYTES)
            self._given = written(self._directory, 1 << 62, 1 << 62)
            self._pristine = Pristine(root)  # last: to look into a closed directory changes its time
            if self._spec.upper is not None:
                upper = _real_directory(self._spec.upper, "upper")
                flatten([upper], root, max_bytes=COPY_BYTES)
                remove_tree(upper)
        except OSError as error:
            raise SandboxError(f"image and layers cannot be copied to {root}: {error}", boundary="start") from error

    def _take_upper(self, layer: Path) -> None:
        """Make an unpacked layer this sandbox's upper, by renames; a host image has an upper of its own for /usr."""
        holds_usr = _holds_usr(_real_directory(str(layer), "upper"))
        try:
            layer.rename(self._directory / "upper/root")
            if self._spec.image == "host" and holds_usr:
                (self._directory / "upper/root/usr").rename(self._directory / "upper/usr")
        except OSError as error:
            raise SandboxError(f"{layer} cannot become the sandbox's upper: {error}", boundary="start") from error

    def root(self, pid: int) -> Path:
        """The merged tree, seen through the mount namespace of bubblewrap's monitor process."""
        return Path(f"/proc/{pid}/root{self._directory}/{MERGED}")

    def untouched(self) -> bool:
        """See `Ground.untouched`; who changed nothing here has changed the times of the uppers all the same."""
        return False

    def trees(self) -> Mapping[bytes, Path]:
        """See `Ground.trees`."""
        if self._pristine is not None:
            return {b"": self._changes(self._pristine)}
        trees = {b"": self._directory / "upper/root"}
        if self._spec.image == "host":
            trees[b"usr"] = self._directory / "upper/usr"
        return trees

    def _changes(self, pristine: Pristine) -> Path:
        """What changed in a root that was copied, in overlay format."""
        remove_tree(self._directory / f"{STAGE}{self._stages}")  # of the last pack
        self._stages += 1
        stage = self._directory / f"{STAGE}{self._stages}"
        try:
            changed(self._directory / MERGED, pristine, stage)
        except OSError as error:
            raise LayerError(
                f"the changes cannot be read: {error}", boundary="layers", content=error.errno in MOVED
            ) from error
        return stage


class BubblewrapBackend(PtyBackend):
    """See `SandboxBackend`; its workers' private directory holds the host's skeleton (some 20 ms, once a worker)."""

    name = "bubblewrap"
    copied = False
    """Every sandbox has a copy of its image and layers, because the kernel mounts no overlay here: the probe tells."""

    async def probe(self) -> None:
        """See `SandboxBackend.probe`."""
        require_programs("bwrap", "unshare", "mount", "bash")
        await self._probe_layers()

    async def _probe_layers(self) -> None:
        """Isolation on the kernel's overlays, else on copies."""
        home = await self._open_home()
        try:
            await probe_isolation(self, home)
        except SandboxUnavailable as refused:
            self.copied = True
            try:
                await probe_isolation(self, home)
            except SandboxUnavailable:
                self.copied = False
                raise refused from None
            log.warning("%s: every sandbox gets a copy of its image and layers: %s", self.name, refused)

    def _ground(self, spec: SandboxSpec, home: Path, directory: Path) -> Ground:
        return BubblewrapGround(spec, directory, home / "skeleton", self._processes, copied=self.copied)

    def _furnish(self, home: Path) -> None:
        build_skeleton(home / "skeleton")


def _real_directory(path: str, what: str) -> Path:
    """The path, refused where it is a link (its maker would choose a directory of the host) or no directory."""
    found = Path(path)
    if not found.is_absolute() or found.is_symlink() or not found.is_dir():
        raise SandboxError(f"the {what} {path!r} is not an absolute path of a directory", boundary="start", path=path)
    return found


def _holds_usr(layer: Path) -> bool:
    """Whether a layer changes /usr.

    Raises:
        SandboxError: a mount point is something other than a directory in it, which no sandbox can have made.
    """
    for name in MOUNT_POINTS:
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR((layer / name).lstat().st_mode):
                raise SandboxError(f"/{name} is no directory in layer {layer}", boundary="start", path=str(layer))
    return (layer / "usr").is_dir()
