"""ENOSPC by a real file system: a tmpfs of a few MiB in a mount namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.runs import REPOSITORY

SCRIPT = 'mount -t tmpfs -o size=3m tmpfs "$1" && exec "$2" -P -m tests.support.full_disk "$1"'


def test_a_full_disk_stops_acknowledgements_and_the_router_goes_on_when_there_is_room(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh", str(tmp_path), sys.executable],
        cwd=REPOSITORY, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("went on\n"), done.stdout + done.stderr
