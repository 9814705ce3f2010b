"""What backends of pty sandboxes share: one spawner, one private directory, and the end of both."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.errors import SandboxUnavailable
from sandbox.ground import Ground
from sandbox.kernel.layer import KernelLayer, user_cache
from sandbox.layers import pack_nothing
from sandbox.limits import UNBOUNDED, Bounds, most_processes, resource_limits
from sandbox.protocols import PackedLayer, SandboxSpec
from sandbox.pty_sandbox import PtySandbox
from sandbox.scratch import make_private, remove_tree
from sandbox.spawn_client import SpawnClient
from sandbox.watchdog import Watchdog


class PtyBackend(ABC):
    """A worker's sandboxes of one kind.

    Args:
        scratch: node-local directory; the backend makes a private one in it at first use, and removes that at its
            close, or the spawner does when the worker dies.
        bounds: what each sandbox may use; by default nothing is bounded.
    """

    def __init__(self, scratch: Path, bounds: Bounds = UNBOUNDED) -> None:
        self._scratch = scratch.absolute()
        self._home: Path | None = None
        self._spawner = SpawnClient()
        self._layer = KernelLayer(self._spawner, self._open_home, cache=user_cache())
        self._sandboxes: set[PtySandbox] = set()
        self._made = 0
        self._empty: PackedLayer | None = None
        self._bounds, self._watchdog = bounds, Watchdog(self._scratch, lambda: self._sandboxes)
        self._spawner.limit(resource_limits(bounds), self._processes)

    @property
    def _processes(self) -> int | None:
        """Most processes of one sandbox, where the kernel can hold that by itself."""
        return most_processes(self._bounds, os.uname().release)

    def create(self, spec: SandboxSpec) -> PtySandbox:
        """See `SandboxBackend.create`."""
        home = self._own_home()
        self._made += 1
        ground = self._ground(spec, home, home / f"s{self._made}")
        sandbox = PtySandbox(
            ground, self._spawner, self._layer, self._sandboxes.discard, self._bounds, nothing=self._nothing
        )
        self._sandboxes.add(sandbox)
        if self._bounds.watched:
            self._watchdog.ensure()
        return sandbox

    async def _nothing(self) -> PackedLayer:
        """The layer of whoever changed nothing: one file for all of them."""
        if self._empty is None:
            self._empty = await asyncio.to_thread(pack_nothing, self._own_home() / "nothing.tar.zst")
        return self._empty

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        await self._watchdog.close()
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

    @abstractmethod
    def _ground(self, spec: SandboxSpec, home: Path, directory: Path) -> Ground:
        """The place of one sandbox."""

    @abstractmethod
    def _furnish(self, home: Path) -> None:
        """Make what all sandboxes of the worker share in its new private directory."""

    def _own_home(self) -> Path:
        if self._home is None:
            self._adopt(self._make_home())
        assert self._home is not None
        return self._home

    async def _open_home(self) -> Path:
        """The private directory, made in a thread where it is not there yet."""
        if self._home is None:
            self._adopt(await asyncio.to_thread(self._make_home))
        return self._own_home()

    def _adopt(self, home: Path) -> None:
        self._home = home
        self._spawner.own(home)

    def _make_home(self) -> Path:
        try:
            home = make_private(self._scratch, "rollmill-sandbox-")
        except OSError as error:
            raise SandboxUnavailable(
                f"no directory can be made in {self._scratch}: {error.strerror}; "
                "give a writable node-local directory (cluster.scratch)",
                boundary="probe",
            ) from error
        try:
            self._furnish(home)
        except (OSError, ValueError) as error:
            remove_tree(home)
            raise SandboxUnavailable(f"what sandboxes share cannot be made: {error}", boundary="probe") from error
        return home
