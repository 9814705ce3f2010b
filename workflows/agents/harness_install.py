"""Installs a harness into a sandbox without a network: wheels fetched outside, laid out as an environment."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from sandbox.protocols import Sandbox
from stages.errors import RolloutError
from workflows.wheels.cache import Lock, WheelCache
from workflows.wheels.errors import UnresolvableError, WheelError
from workflows.wheels.install import site_packages, unpack
from workflows.wheels.target import PROBE, PythonTarget, parse

ROOT: Final = "/opt/rollmill/harness"
BIN: Final = f"{ROOT}/bin"
VERSION: Final = 1
"""Of what is made here: raised when that changes, so that old layers are not taken for new ones."""
_STAGE: Final = "/tmp/rollmill-harness"  # noqa: S108 - inside the sandbox
_PART_BYTES: Final = 32 << 20
_SHELL_S: Final = 600.0


class Parts(msgspec.Struct, frozen=True):
    """What is installed.

    Args:
        requirements: in the words of PEP 508.
        files: name below ROOT -> text.
        without: distributions that are left out although another's metadata names them.
        python: the image's interpreter.
    """

    requirements: tuple[str, ...]
    files: Mapping[str, str]
    without: tuple[str, ...]
    python: str


def key(parts: Parts) -> str:
    """Names what `install` makes of these; empty where it makes nothing."""
    if not parts.requirements and not parts.files:
        return ""
    made = [VERSION, sorted(parts.requirements), sorted(parts.files.items()), sorted(parts.without), parts.python]
    return hashlib.sha256(msgspec.json.encode(made)).hexdigest()


async def install(sandbox: Sandbox, parts: Parts, cache: WheelCache) -> None:
    """Make ROOT: an environment of the sandbox's Python with the wheels, and files beside it.

    Args:
        sandbox: a fresh one; its image has bash and tar, and a Python for which there are wheels.
        parts: what to install.
        cache: of wheels.

    Raises:
        RolloutError: final where no wheels satisfy the requirements or the image lacks a program.
    """
    try:
        target = await _ask(sandbox, parts.python)
        lock = await asyncio.to_thread(cache.lock, parts.requirements, target)
        tar = await asyncio.to_thread(_laid_out, lock, parts, cache, target)
    except UnresolvableError as error:
        raise RolloutError(f"the harness cannot be installed: {error}", final=True) from error
    except WheelError as error:
        raise RolloutError(f"the harness cannot be installed: {error}") from error
    for number, start in enumerate(range(0, len(tar), _PART_BYTES)):
        await sandbox.files.write(f"{_STAGE}/part.{number:06d}", tar[start : start + _PART_BYTES])
    site = f"{ROOT}/{site_packages(target.version)}"
    script = (
        f"set -e\numask 022\ncat {_STAGE}/part.* | tar -xf - -C / --no-same-owner\nrm -rf {_STAGE}\n"
        f"{BIN}/python -I -m compileall -q --invalidation-mode unchecked-hash {site} >/dev/null 2>&1 || true\n"
    )
    result = await sandbox.shell.run(f"bash -c {shlex.quote(script)}", timeout_s=_SHELL_S)
    if result.exit_code != 0:
        said = result.output.strip()[-300:]
        raise RolloutError(
            f"the harness cannot be installed: exit code {result.exit_code}: {said} (the image needs bash and tar)",
            final=not result.timed_out,
        )


async def _ask(sandbox: Sandbox, python: str) -> PythonTarget:
    await sandbox.files.write(f"{_STAGE}/probe.py", PROBE)
    asked = f"{shlex.quote(python)} -I -S {_STAGE}/probe.py > {_STAGE}/probe.json"
    result = await sandbox.shell.run(asked, timeout_s=_SHELL_S)
    if result.timed_out:
        raise RolloutError(f"the harness cannot be installed: {python} said nothing within {_SHELL_S:g} s")
    if result.exit_code != 0:
        raise UnresolvableError(
            f"the image's {python} gave exit code {result.exit_code}: {result.output.strip()[-200:]} (a harness is "
            "installed for a Python of the image; agent.harness=command needs none)"
        )
    return parse(await sandbox.files.read(f"{_STAGE}/probe.json"))


def _laid_out(lock: Lock, parts: Parts, cache: WheelCache, target: PythonTarget) -> bytes:
    """One tar of the whole environment (PEP 405)."""
    into = io.BytesIO()
    config = (
        f"home = {Path(target.executable).parent}\ninclude-system-site-packages = false\n"
        f"version = {target.markers['python_full_version']}\n"
    )
    with tarfile.open(fileobj=into, mode="w") as tar:
        for name, text in {"pyvenv.cfg": config, **parts.files}.items():
            _add(tar, name, text.encode(), executable=False)
        for name in ("python", "python3"):
            link = tarfile.TarInfo(f"{ROOT}/bin/{name}".lstrip("/"))
            link.type, link.linkname = tarfile.SYMTYPE, target.executable
            tar.addfile(link)
        for wheel in lock.wheels:
            if wheel.name in parts.without:
                continue
            data = cache.read(wheel)
            for entry in unpack(wheel.file, data, version=target.version, interpreter=f"{BIN}/python"):
                _add(tar, entry.path, entry.data, executable=entry.executable)
    return into.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, *, executable: bool) -> None:
    member = tarfile.TarInfo(f"{ROOT}/{name}".lstrip("/"))
    member.size, member.mode = len(data), 0o755 if executable else 0o644
    tar.addfile(member, io.BytesIO(data))
