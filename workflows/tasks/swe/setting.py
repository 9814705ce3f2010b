"""INIT of task=swe: a one-commit repository and an installed environment, made in a sandbox that has no network.

    /testbed                  the repository: one commit with a fixed author and date, and nothing that came later
    /opt/rollmill/env         a virtual environment of the sandbox's own Python with the locked wheels
    /opt/rollmill/lock.json   which wheels those are

The archive is unpacked and the wheels are fetched and laid out on this side; the sandbox only unpacks one tar.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sandbox.protocols import Sandbox
from stages.protocols import Row
from workflows.errors import TaskDataError
from workflows.tasks.swe import archive, columns, project
from workflows.wheels.cache import Lock, WheelCache
from workflows.wheels.errors import WheelError
from workflows.wheels.install import site_packages, unpack
from workflows.wheels.target import PROBE, PythonTarget, parse

ROOT: Final = "/testbed"
HOME: Final = "/opt/rollmill"
ENV: Final = f"{HOME}/env"
PYTHON: Final = f"{ENV}/bin/python"
SOURCE_PTH: Final = "rollmill-source.pth"
VERSION: Final = 1
"""Of what is made here: raised when that changes, so that old layers are not taken for new ones."""

_STAGE: Final = "/tmp/rollmill-setup"  # noqa: S108 - inside the sandbox
_PART_BYTES: Final = 32 << 20
_SHELL_S: Final = 300.0
_COMMIT_DATE: Final = "2000-01-01T00:00:00Z"

_GIT: Final = f"""
export HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_TERMINAL_PROMPT=0
export GIT_AUTHOR_NAME=rollmill GIT_AUTHOR_EMAIL=rollmill@localhost GIT_AUTHOR_DATE={_COMMIT_DATE}
export GIT_COMMITTER_NAME=rollmill GIT_COMMITTER_EMAIL=rollmill@localhost GIT_COMMITTER_DATE={_COMMIT_DATE}
cd {ROOT}
g() {{ git -c safe.directory={ROOT} -c core.logAllRefUpdates=false -c core.autocrlf=false -c gc.auto=0 "$@"; }}
g init -q --template= .
g symbolic-ref HEAD refs/heads/main
g add -Af .
g commit -q --no-verify --no-gpg-sign -m 'The repository as it is given'
"""


def laid_out(row: Row, target: PythonTarget, lock: Lock, cache: WheelCache, tree: Path) -> bytes:
    """The tar that the sandbox unpacks: repository, environment and lock.

    Raises:
        TaskDataError: the archive cannot be used.
        UnresolvableError: a wheel is, or brings, the project itself.
        WheelError: a wheel is damaged.
    """
    archive.unpack(Path(row["archive"]), tree, version=row.get("version", ""))
    source = tree / row.get("source_root", "")
    if not source.is_dir():
        raise TaskDataError(f"archive {row['archive']}: source_root {row['source_root']!r} is no directory in it")
    found = project.read(row, tree)
    project.refuse_own(found, lock)
    site = site_packages(target.version)
    entries = list(project.scripts(found, PYTHON))
    for wheel in lock.wheels:
        for entry in unpack(wheel.file, cache.read(wheel), version=target.version, interpreter=PYTHON):
            project.refuse_packages(found, entry, site, wheel.file)
            entries.append(entry)
    files = {f"{ENV}/{entry.path}": (entry.data, 0o755 if entry.executable else 0o644) for entry in entries}
    files |= {name: (text.encode(), 0o644) for name, text in _environment(row, found, target).items()}
    record = {"v": VERSION, "archive_sha256": row.get("archive_sha256", ""), "lock": lock}
    files[f"{HOME}/lock.json"] = (msgspec.json.format(msgspec.json.encode(record)), 0o644)
    links = {f"{ENV}/bin/{name}": target.executable for name in ("python", "python3", f"python{target.version}")}
    return archive.pack(tree, ROOT, files, links)


def _environment(row: Row, found: project.Project, target: PythonTarget) -> dict[str, str]:
    """What makes the directory a virtual environment (PEP 405) in which the project can be imported and named."""
    site = f"{ENV}/{site_packages(target.version)}"
    files = {
        f"{ENV}/pyvenv.cfg": f"home = {Path(target.executable).parent}\ninclude-system-site-packages = false\n"
        f"version = {target.markers['python_full_version']}\n",
        f"{ENV}/bin/activate": f"export VIRTUAL_ENV={ENV} PATH={ENV}/bin:$PATH\nunset PYTHONHOME\nhash -r\n",
        f"{site}/{SOURCE_PTH}": f"{ROOT}/{row.get('source_root', '')}".rstrip("/") + "\n",
    }
    if not found.metadata:
        files |= {f"{site}/{name}": text for name, text in project.distribution_files(found).items()}
    return files


async def ask(sandbox: Sandbox, python: str) -> PythonTarget:
    """Which Python the sandbox has.

    Raises:
        WheelError: none.
    """
    await sandbox.files.write(f"{_STAGE}/probe.py", PROBE)
    result = await sandbox.shell.run(
        f"{shlex.quote(python)} -I -S {_STAGE}/probe.py > {_STAGE}/probe.json", timeout_s=_SHELL_S
    )
    if result.exit_code != 0:
        raise WheelError(f"the image's {python} gave exit code {result.exit_code}: {result.output.strip()[-200:]}")
    return parse(await sandbox.files.read(f"{_STAGE}/probe.json"))


async def install(sandbox: Sandbox, tar: bytes, site: str) -> None:
    """Unpack the tar in the sandbox and commit the repository.

    Raises:
        TaskDataError: a command failed there.
    """
    for number, start in enumerate(range(0, len(tar), _PART_BYTES)):
        await sandbox.files.write(f"{_STAGE}/part.{number:06d}", tar[start : start + _PART_BYTES])
    script = (
        f"set -e\numask 022\ncat {_STAGE}/part.* | tar -xf - -C / --no-same-owner\nrm -rf {_STAGE}\n"
        f"{PYTHON} -I -m compileall -q --invalidation-mode unchecked-hash {ENV}/{site} > /dev/null 2>&1 || true\n{_GIT}"
    )
    result = await sandbox.shell.run(f"bash -c {shlex.quote(script)}", timeout_s=_SHELL_S)
    if result.exit_code != 0:
        raise TaskDataError(
            f"the environment cannot be set up: exit code {result.exit_code}: {result.output.strip()[-400:]} "
            "(the image needs bash, tar, git and Python)"
        )


def temporary_tree() -> Path:
    """A new node-local directory's child, for one archive; remove its parent afterwards."""
    return Path(tempfile.mkdtemp(prefix="rollmill-swe-")) / "tree"


def remove(tree: Path) -> None:
    """Remove what `temporary_tree` made."""
    shutil.rmtree(tree.parent, ignore_errors=True)


def requirements(row: Mapping[str, Any]) -> Sequence[str]:
    """The row's requirements."""
    return columns.texts(row["requirements"])
