"""Which code a job was submitted with: a digest of the five packages, so that a change before its start is noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from launch.check import PACKAGES

SUFFIXES: Final = frozenset({".py", ".yaml"})
CODE_CHANGED: Final = "ROLLMILL_CODE_CHANGED"
"""Environment variable that a job's leader sets to 1 for its steps where the code is not what was submitted."""


def code_digest(home: Path | None = None) -> str:
    """sha256 over paths and contents of the packages' .py and .yaml files, in hexadecimal. Blocking: some 10 ms.

    Args:
        home: the folder that holds the packages; None: this installation's.
    """
    home = home or Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in sorted(PACKAGES):
        files = (file for file in (home / package).rglob("*") if file.suffix in SUFFIXES and file.is_file())
        for name in sorted(file.relative_to(home).as_posix() for file in files):
            content = (home / name).read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()
