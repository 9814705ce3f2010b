"""The wheel cache of a store: wheels by content, and locks that say which of them satisfy which requirements where.

`wheels/<sha256>.whl` and `wheels/locks/<key>.json`, where the key is a digest of the requirements and the target's
Python and platform. A lock that is there is never resolved again, so an environment stays what it was. All calls block.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from stages import sharedfs
from workflows.wheels.errors import WheelError
from workflows.wheels.fetch import fetch
from workflows.wheels.target import PythonTarget

LOCK_VERSION: Final = 1
FETCH_S: Final = 300.0

_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a shared filesystem without flock answers."""

Fetch = Callable[..., list[Path]]


class Wheel(msgspec.Struct, frozen=True):
    """One wheel of a lock; `file` is the name that says what it fits."""

    name: str
    version: str
    file: str
    sha256: str
    size_bytes: int


class Lock(msgspec.Struct, frozen=True):
    """What a set of requirements means for one kind of Python."""

    v: int
    requirements: list[str]
    target: dict[str, str]
    wheels: list[Wheel]


def canonical(name: str) -> str:
    """A distribution's name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_key(requirements: Sequence[str], target: PythonTarget) -> str:
    """sha256, in hexadecimal; the order of the requirements does not matter."""
    asked = [LOCK_VERSION, sorted({requirement.strip() for requirement in requirements}), target.identity]
    return hashlib.sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()


class WheelCache:
    """The wheels of one store.

    Args:
        root: the store's directory of wheels.
        environ: where registry settings are taken from.
        fetch: resolves and downloads; a test gives its own.
    """

    def __init__(self, root: Path, environ: Mapping[str, str], fetch: Fetch = fetch) -> None:
        self._root, self._environ, self._fetch = root, environ, fetch

    def lock(self, requirements: Sequence[str], target: PythonTarget) -> Lock:
        """The lock of these requirements; resolved and fetched now if nobody has before.

        Raises:
            UnresolvableError: no wheels satisfy them.
            WheelError: they could not be fetched.
        """
        key = lock_key(requirements, target)
        found = self._find(key)
        if found is not None:
            return found
        sharedfs.make_dirs(self._root / "locks")
        with _alone(self._root / "locks" / f"{key}.lock"):
            return self._find(key) or self._resolve(key, requirements, target)

    def read(self, wheel: Wheel) -> bytes:
        """A wheel's bytes.

        Raises:
            WheelError: the store's file is not what its name says.
        """
        data = sharedfs.read_bytes(self._path(wheel.sha256))
        if hashlib.sha256(data).hexdigest() != wheel.sha256:
            raise WheelError(f"{self._path(wheel.sha256)} is damaged: delete it, and it is fetched again")
        return data

    def _find(self, key: str) -> Lock | None:
        try:
            lock = msgspec.json.decode(sharedfs.read_bytes(self._root / "locks" / f"{key}.json"), type=Lock)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return lock if all(sharedfs.exists(self._path(wheel.sha256)) for wheel in lock.wheels) else None

    def _resolve(self, key: str, requirements: Sequence[str], target: PythonTarget) -> Lock:
        directory = Path(tempfile.mkdtemp(prefix="rollmill-wheels-"))
        try:
            files = self._fetch(requirements, target, directory, timeout_s=FETCH_S, environ=self._environ)
            wheels = [self._keep(path) for path in files]
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        lock = Lock(LOCK_VERSION, sorted(requirements), target.identity, wheels)
        sharedfs.write_atomic(self._root / "locks" / f"{key}.json", msgspec.json.encode(lock))
        return lock

    def _keep(self, path: Path) -> Wheel:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        kept = self._path(digest)
        if not sharedfs.exists(kept) or sharedfs.stat_size(kept) != len(data):
            sharedfs.write_atomic(kept, data)
        parts = path.name.removesuffix(".whl").split("-")
        return Wheel(canonical(parts[0]), parts[1], path.name, digest, len(data))

    def _path(self, sha256: str) -> Path:
        return self._root / f"{sha256}.whl"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of the cluster at a time, where the filesystem's locks reach so far; they die with their holder.

    Without them two may fetch the same: what they leave is named by content, so that nothing is wrong, only done twice.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, sharedfs.FILE_MODE)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(fd)
