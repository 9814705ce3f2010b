"""The bubblewrap backend: user namespace, kernel overlays and bwrap, for root and for ordinary users alike."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.bashtext import BASE_ENV, shell_env
from sandbox.errors import SandboxError, SandboxUnavailable
from sandbox.ground import Entry
from sandbox.hostroot import build_skeleton
from sandbox.mountplan import MERGED, enter_argv, plan_overlays
from sandbox.probe import probe_isolation, require_programs
from sandbox.protocols import SandboxSpec
from sandbox.pty_sandbox import PtySandbox
from sandbox.scratch import make_private, remove_tree
from sandbox.spawn_client import SpawnClient


class BubblewrapGround:
    """One sandbox's directory and namespaces.

    Args:
        spec: what was asked for.
        directory: its own, not made yet.
        skeleton: the host image's lowest layer.
    """

    token = None

    def __init__(self, spec: SandboxSpec, directory: Path, skeleton: Path) -> None:
        self._spec, self._directory, self._skeleton = spec, directory, skeleton

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
        env = shell_env(self._spec.env)
        argv = enter_argv(self._directory, overlays, env, self._spec.limits.shm_mib)
        return Entry(tuple(argv), {"PATH": os.environ.get("PATH", "") + ":" + BASE_ENV["PATH"]}, "/")

    def root(self, pid: int) -> Path:
        """The merged tree, seen through the mount namespace of bubblewrap's monitor process."""
        return Path(f"/proc/{pid}/root{self._directory}/{MERGED}")

    def trees(self) -> Mapping[bytes, Path]:
        """See `Ground.trees`."""
        trees = {b"": self._directory / "upper/root"}
        if self._spec.image == "host":
            trees[b"usr"] = self._directory / "upper/usr"
        return trees


class BubblewrapBackend:
    """See `SandboxBackend`.

    Args:
        scratch: node-local directory; the backend makes a private one in it, and removes that at its close or death.
    """

    name = "bubblewrap"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch.resolve()
        self._home: Path | None = None
        self._spawner = SpawnClient()
        self._sandboxes: set[PtySandbox] = set()
        self._made = 0

    async def probe(self) -> None:
        """See `SandboxBackend.probe`."""
        require_programs("bwrap", "unshare", "mount", "bash")
        await probe_isolation(self, self._own_home())

    def create(self, spec: SandboxSpec) -> PtySandbox:
        """See `SandboxBackend.create`."""
        home = self._own_home()
        self._made += 1
        ground = BubblewrapGround(spec, home / f"s{self._made}", home / "skeleton")
        sandbox = PtySandbox(ground, self._spawner, self._sandboxes.discard)
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        stops = await asyncio.gather(*(one.stop() for one in list(self._sandboxes)), return_exceptions=True)
        await self._spawner.close()
        if self._home is not None:
            await asyncio.to_thread(remove_tree, self._home)
            self._home = None
        for failed in stops:
            if isinstance(failed, BaseException):
                raise failed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _own_home(self) -> Path:
        """The worker's private directory with the skeleton in it; some 20 ms once a worker."""
        if self._home is None:
            try:
                home = make_private(self._scratch, "rollmill-sandbox-")
            except OSError as error:
                raise SandboxUnavailable(
                    f"no directory can be made in {self._scratch}: {error.strerror}; "
                    "give a writable node-local directory (cluster.scratch)",
                    boundary="probe",
                ) from error
            self._spawner.own(home)
            try:
                build_skeleton(home / "skeleton")
            except (OSError, ValueError) as error:
                remove_tree(home)
                raise SandboxUnavailable(f"the host's root cannot be copied: {error}", boundary="probe") from error
            self._home = home
        return self._home


def _real_directory(path: str, what: str) -> Path:
    """The path, refused where it is a link (its maker would choose a directory of the host) or no directory."""
    found = Path(path)
    if not found.is_absolute() or found.is_symlink() or not found.is_dir():
        raise SandboxError(f"the {what} {path!r} is not an absolute path of a directory", boundary="start", path=path)
    return found


def _holds_usr(layer: Path) -> bool:
    try:
        return stat.S_ISDIR((layer / "usr").lstat().st_mode)
    except OSError:
        return False
