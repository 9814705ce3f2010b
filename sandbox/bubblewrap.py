"""The bubblewrap backend: user namespace, kernel overlays and bwrap, for root and for ordinary users alike."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sandbox.bashtext import BASE_ENV, shell_env
from sandbox.errors import SandboxError
from sandbox.ground import Entry, Ground
from sandbox.hostroot import build_skeleton
from sandbox.mountplan import MERGED, Overlay, enter_argv, plan_overlays
from sandbox.probe import probe_isolation, require_programs
from sandbox.protocols import SandboxSpec
from sandbox.pty_backend import PtyBackend

MOUNT_POINTS = ("usr", "proc", "dev")


class BubblewrapGround:
    """One sandbox's directory and namespaces.

    Args:
        spec: what was asked for.
        directory: its own, not made yet.
        skeleton: the host image's lowest layer.
        processes: most processes in it, where the kernel can hold that.
    """

    token = None
    prefix = ""

    def __init__(self, spec: SandboxSpec, directory: Path, skeleton: Path, processes: int | None = None) -> None:
        self._spec, self._directory, self._skeleton, self._processes = spec, directory, skeleton, processes
        self._overlays: list[Overlay] = []

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
        layers = [_real_directory(layer, "layer") for layer in self._spec.layers]
        if self._spec.image != "host":
            _real_directory(self._spec.image, "image")
        overlays = plan_overlays(self._spec.image, self._skeleton, layers, [one for one in layers if _holds_usr(one)])
        self._directory.mkdir(mode=0o700)
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
        self._overlays = overlays
        env, shm_mib = shell_env(self._spec.env), self._spec.limits.shm_mib
        return _entry(enter_argv(self._directory, overlays, env, shm_mib, processes=self._processes))

    def enter(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Entry:
        """See `Ground.enter`."""
        shm_mib = self._spec.limits.shm_mib
        return _entry(
            enter_argv(
                self._directory, self._overlays, env, shm_mib, argv, cwd=cwd, alone=True, processes=self._processes
            )
        )

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

    def trees(self) -> Mapping[bytes, Path]:
        """See `Ground.trees`."""
        trees = {b"": self._directory / "upper/root"}
        if self._spec.image == "host":
            trees[b"usr"] = self._directory / "upper/usr"
        return trees


class BubblewrapBackend(PtyBackend):
    """See `SandboxBackend`; its workers' private directory holds the host's skeleton (some 20 ms, once a worker)."""

    name = "bubblewrap"

    async def probe(self) -> None:
        """See `SandboxBackend.probe`."""
        require_programs("bwrap", "unshare", "mount", "bash")
        await probe_isolation(self, await self._open_home())

    def _ground(self, spec: SandboxSpec, home: Path, directory: Path) -> Ground:
        return BubblewrapGround(spec, directory, home / "skeleton", self._processes)

    def _furnish(self, home: Path) -> None:
        build_skeleton(home / "skeleton")


def _entry(argv: list[str]) -> Entry:
    return Entry(tuple(argv), {"PATH": os.environ.get("PATH", "") + ":" + BASE_ENV["PATH"]}, "/")


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
