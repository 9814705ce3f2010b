"""A copy of this installation that every user of the machine can read: a checkout may lie below a closed directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tests.support.cluster.binaries import SYSTEM_PATH
from tests.support.cluster.errors import ClusterError

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
Put = Callable[[Path, Path], None]
CHECKOUT = Path(__file__).resolve().parents[3]
PARTS = ("workflows", "stages", "sandbox", "conf", "launch", "tests")
"""What a job needs of the checkout; `tests` for the agents and tasks that tests bring along."""


def install(target: Path) -> Path:
    """Make the copy below `target`, with hard links where that is possible.

    Returns:
        Its python.

    Raises:
        ClusterError: no interpreter of this version can be run by others.
    """
    interpreter = _readable_interpreter()
    environment, checkout = target / "venv", target / "checkout"
    packages = environment / "lib" / VERSION / "site-packages"
    _tree(Path(sysconfig.get_path("purelib")), packages, _link)
    for path in packages.glob("*rollmill*.pth"):  # the editable installation's, which points to this checkout
        path.unlink()
    (packages / "_rollmill.pth").write_text(f"{checkout}\n")
    (environment / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    python = environment / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(interpreter)
    script = python.with_name("rollmill")
    script.write_text(f"#!{python}\nimport sys\n\nfrom launch.cli import main\n\nsys.exit(main())\n")
    script.chmod(0o755)
    for part in PARTS:
        _tree(CHECKOUT / part, checkout / part, _copy)
    subprocess.run([python, "-m", "compileall", "-q", checkout], check=True)
    return python


def _readable_interpreter() -> Path:
    """This interpreter, or where others cannot reach it the system's of the same version: its packages fit both."""
    own = Path(sys.base_prefix, "bin", VERSION)
    if all(path.stat().st_mode & 0o005 == 0o005 for path in (own, *own.parents)):
        return own
    found = shutil.which(VERSION, path=SYSTEM_PATH)
    if found is None:
        raise ClusterError(f"test cluster: other users cannot run {own}, and there is no {VERSION} in {SYSTEM_PATH}")
    return Path(found)


def _tree(source: Path, target: Path, put: Put) -> None:
    for here, _, files in os.walk(source):
        place = target / Path(here).relative_to(source)
        place.mkdir(parents=True, mode=0o755)
        place.chmod(0o755)
        for name in files:
            put(Path(here) / name, place / name)


def _link(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.stat().st_mode & 0o004:
        _copy(source, target)
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:  # a byte-code file that was renamed while we looked
        return
    target.chmod(target.stat().st_mode | 0o444)
