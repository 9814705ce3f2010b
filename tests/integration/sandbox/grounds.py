"""What the sandbox's integration tests share: a backend by name, one sandbox in one event loop, an image directory."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from sandbox.apptainer import ApptainerBackend
from sandbox.bubblewrap import BubblewrapBackend
from sandbox.fake import FakeBackend
from sandbox.none import NoneBackend
from sandbox.protocols import Program, Sandbox, SandboxBackend, SandboxLimits, SandboxSpec, Screen
from sandbox.pty_backend import PtyBackend

T = TypeVar("T")

ISOLATING = ("bubblewrap", "apptainer")
BACKENDS = (*ISOLATING, "none")

PACKED_IMAGE = "image-{}.tar.zst"
"""Where a copy of these tests for another user finds the tests' image; its digest is part of the name."""

QUICK = SandboxLimits(interrupt_grace_s=0.3, kill_grace_s=0.4)
"""Short graces: the tests that need them would wait a second each."""
OBEYING = SandboxSpec(limits=SandboxLimits(interrupt_grace_s=30.0, kill_grace_s=30.0))
"""For what ends when it is told to, however long that takes here: no shell is lost to a machine that is slow."""
STUBBORN = SandboxSpec(limits=SandboxLimits(interrupt_grace_s=0.3, kill_grace_s=30.0))
"""For what only a kill ends; its shell stays."""


def backend_named(name: str, scratch: Path) -> SandboxBackend:
    made: dict[str, type[FakeBackend | PtyBackend]] = {
        "fake": FakeBackend, "bubblewrap": BubblewrapBackend, "apptainer": ApptainerBackend, "none": NoneBackend,
    }  # fmt: skip
    return made[name](scratch)


def in_sandbox(name: str, scratch: Path, body: Callable[[Sandbox], Awaitable[T]], spec: SandboxSpec | None = None) -> T:
    """Run `body` with a fresh sandbox of the named backend, and stop both."""

    async def scenario() -> T:
        async with (
            backend_named(name, scratch) as backend,
            backend.create(spec or SandboxSpec(limits=QUICK)) as sandbox,
        ):
            return await body(sandbox)

    return asyncio.run(scenario())


def image_directory(target: Path) -> Path:
    """A tiny root filesystem out of this machine's bash and a few programs with their libraries."""
    for name in ("bash", "sh", "cat", "ls", "rm", "mkdir", "id", "sleep"):
        found = shutil.which(name)
        assert found, name
        _copy(Path(found).resolve(), target / "usr/bin" / name)
        said = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", said):
            _copy(Path(library).resolve(), target / library.lstrip("/"))
    for name in ("proc", "dev", "tmp", "etc", "work"):
        (target / name).mkdir()
    (target / "bin").symlink_to("usr/bin")
    (target / "etc/passwd").write_text("root:x:0:0:image:/root:/bin/bash\n")
    return target


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def wait_until(what: str, holds: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Poll until `holds` gives something true."""
    pause = threading.Event()
    end = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        pause.wait(0.01)


async def shown(program: Program, holds: Callable[[Screen], object], deadline_s: float = 60.0) -> Screen:
    """The first screen of a program of which `holds` says yes."""
    end = time.monotonic() + deadline_s
    while True:
        screen = await program.screen(0.5)
        if holds(screen):
            return screen
        assert time.monotonic() < end, f"not within {deadline_s} s: {screen}"


def alive(pid: int) -> bool:
    """The process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
