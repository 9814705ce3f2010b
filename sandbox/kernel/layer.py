"""Our ipykernel for images that have none: laid out once, beside the installation or in the user's own cache.

Which files it has is said by its name, a digest of the versions that it is made of; whether they are all still there by
an inventory in it, which each worker compares once. Who lays it out holds a lock, and the others wait.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from sandbox.errors import SandboxError
from sandbox.execution import Running
from sandbox.kernel.distributions import DONE, ROOT, inventory, needed
from sandbox.scratch import make_private, remove_tree
from sandbox.spawn_client import SpawnClient

_MAIN = "import sys; sys.path.append(sys.argv.pop(1)); from sandbox.kernel.distributions import main; main()"
_DEADLINE_S = 120.0
"""Two seconds of work on an idle core: 900 files to link, 400 modules to compile."""
_LOOK_S = 0.05
_FORM = "2"
"""Of the directory; another number for another inventory or other compiled files."""
SHARED = Path(sys.prefix) / "share/rollmill"
"""Beside what it is made of: its files are links, and whoever may write there could change them anyway."""


def user_cache() -> Path | None:
    """The user's own cache directory, after XDG_CACHE_HOME; None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):
        return (Path(named) if named.startswith("/") else Path.home() / ".cache") / "rollmill"
    return None


class KernelLayer:
    """Belongs to one event loop.

    Args:
        spawner: runs the program that lays it out.
        home: the worker's private directory: where it is laid out when nothing else can be written.
        shared: of the installation: where it stays.
        cache: where it stays otherwise; taken only where nobody else may write there.
    """

    def __init__(
        self, spawner: SpawnClient, home: Callable[[], Awaitable[Path]], shared: Path = SHARED,
        cache: Path | None = None,
    ) -> None:  # fmt: skip
        self._spawner, self._home, self._shared, self._cache = spawner, home, shared, cache
        self._lock = asyncio.Lock()
        self._tries = 0
        self._path: Path | None = None

    async def path(self) -> Path | None:
        """The directory; None where ipykernel is not installed here.

        Raises:
            SandboxError: it cannot be laid out.
        """
        async with self._lock:
            if self._path is None and importlib.util.find_spec(ROOT) is not None:
                name = await asyncio.to_thread(_name)
                self._path = await self._found(name) or await self._made(name)
            return self._path

    async def _found(self, name: str) -> Path | None:
        """One that is there and whole."""
        for place in (self._shared, *([] if self._cache is None else [self._cache])):
            if await asyncio.to_thread(_is_whole, place / name, private=place == self._cache):
                return place / name
        return None

    async def _made(self, name: str) -> Path:
        """A new one, where it can stay, else in the worker's directory."""
        if await asyncio.to_thread(_can_hold, self._shared, private=False):
            return await self._build(self._shared / name)
        if self._cache is not None and await asyncio.to_thread(_can_hold, self._cache, private=True):
            return await self._build(self._cache / name)
        self._tries += 1
        target = await self._home() / f"kernel{self._tries}"
        await self._fill(target)
        return target

    async def _build(self, lasting: Path) -> Path:
        """Lay it out under a name of its own until it is whole, unless another process just did."""
        private = lasting.parent == self._cache
        async with _alone(lasting.with_name(f".{lasting.name}.lock")):
            if await asyncio.to_thread(_is_whole, lasting, private=private):
                return lasting
            target = await asyncio.to_thread(_new_place, lasting)
            await self._fill(target)
            await asyncio.to_thread(_settle, target, lasting)
        return lasting

    async def _fill(self, target: Path) -> None:
        """Have it laid out in a directory that does not exist, whole or not at all."""
        try:
            await self._run(target)
        except BaseException:  # half of it serves nobody; raised again
            await asyncio.to_thread(remove_tree, target)
            raise

    async def _run(self, target: Path) -> None:
        places = [place for place in sys.path if Path(place).is_absolute()]
        package = str(Path(__file__).parents[2])
        process = await self._spawner.execute(
            [sys.executable, "-I", "-S", "-c", _MAIN, package, str(target), *places], env={}, cwd="/",
            timeout_s=_DEADLINE_S, token=None,
        )  # fmt: skip
        running = Running(
            process, lambda: self._spawner.kill(process.pid), b"", output_bytes=4096, report_bytes=0, leave_s=10.0
        )
        done = await running.result(_DEADLINE_S)
        if done.exit_code != 0 or not (target / DONE).exists():
            said = done.output.decode("utf-8", "replace").strip()[-1000:]
            raise SandboxError(f"ipykernel cannot be laid out in {target}: {said or done.exit_code}", boundary="python")


def _name() -> str:
    """Of the layer: another one for other versions of what it is made of."""
    parts = [f"{one.name} {one.version} {one.locate_file('')}" for one in needed()]
    return "kernel-" + hashlib.sha256("\n".join([_FORM, sys.version, *sorted(parts)]).encode()).hexdigest()[:16]


def _is_whole(directory: Path, *, private: bool) -> bool:
    """Whether it is there with every file that it was made with; `private`: and nobody else may write to it."""
    with suppress(OSError):
        if private and not (_is_own(directory.parent) and _is_own(directory)):
            return False
        return (directory / DONE).read_text() == inventory(directory)
    return False


def _is_own(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _can_hold(place: Path, *, private: bool) -> bool:
    """Whether directories can be made there; `private`: and nobody else can."""
    with suppress(OSError):
        place.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        if not private or _is_own(place):
            make_private(place, ".tried-").rmdir()
            return True
    return False


def _opened(file: Path) -> int | None:
    """A lock file's descriptor; None where it is another user's, or a link."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


@asynccontextmanager
async def _alone(file: Path) -> AsyncIterator[None]:
    """Hold the lock file, as long as the block or this process lasts; not for ever, and not where none can be had."""
    lock = _opened(file)
    if lock is None:
        yield
        return
    try:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOOK_S)
            except OSError:  # a network filesystem without locks: it is laid out twice, and one settles
                break
        yield
    finally:
        os.close(lock)


def _new_place(lasting: Path) -> Path:
    """A name beside the lasting one that nobody has; the program makes the directory."""
    place = make_private(lasting.parent, f".{lasting.name}-")
    place.rmdir()
    return place


def _settle(target: Path, lasting: Path) -> None:
    """Give it its lasting name; what has that name and is not whole goes, what is whole stays in its place."""
    try:
        target.rename(lasting)
    except OSError:
        if _is_whole(lasting, private=False):
            remove_tree(target)
            return
        gone = _new_place(lasting)
        lasting.rename(gone)
        target.rename(lasting)
        remove_tree(gone)
