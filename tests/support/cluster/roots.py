"""Where clusters lie, and which of those directories is whose: a lock that ends with its process says so."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from tests.support.cluster.errors import ClusterError

PARENT = Path("/srv/rollmill-test") if os.getuid() == 0 else Path.home() / ".rollmill-test"
"""Not below /tmp, which the checks of a submission rightly call local to one node. Short: sockets lie below it."""


class Root:
    """One directory for a cluster, locked for as long as this process has it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def first_free(cls) -> Root:
        """The first numbered directory that no living process holds; what is left in it is of a killed session."""
        for number in range(100):
            root = cls.at(PARENT / str(number))
            if root is not None:
                return root
        raise ClusterError(f"test cluster: a hundred clusters lie below {PARENT}; end some")

    @classmethod
    def at(cls, path: Path) -> Root | None:
        """This directory, or None while another process holds it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        except OSError as error:
            raise ClusterError(f"test cluster: {path.parent} cannot be made ({error.strerror}): set HOME") from error
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(path, lock)

    def clear(self) -> None:
        """Remove it with everything below."""
        if self.path.exists():
            shutil.rmtree(self.path)

    def release(self) -> None:
        """Let others have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
