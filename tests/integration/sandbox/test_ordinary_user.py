"""The same suite once more as an ordinary user, and equal digests from root and from that user."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel.distributions import needed
from sandbox.layers import pack
from sandbox.protocols import SandboxSpec
from tests.integration.sandbox.grounds import PACKED_IMAGE, backend_named
from tests.integration.sandbox.test_layer_chain import FIRST

REPOSITORY = Path(__file__).resolve().parents[3]
UID = 54321
"""A number that needs no entry in /etc/passwd."""
SUITE = (
    "test_contract.py", "test_copied.py", "test_execute.py", "test_files.py", "test_hostile_kernel.py",
    "test_images.py", "test_isolation.py", "test_layer_chain.py", "test_limits.py", "test_python_tool.py",
    "test_shell_state.py", "test_worker_death.py",
)  # fmt: skip
NEEDED = (
    "msgspec", "zstandard", "ptyprocess", "pyte", "wcwidth", "pytest", "_pytest", "pluggy", "iniconfig", "packaging",
    "pygments",
)  # fmt: skip

_DIGEST = """
import asyncio, sys
from tests.integration.sandbox.test_ordinary_user import digest
print(asyncio.run(digest(sys.argv[1], sys.argv[2])))
"""


async def digest(name: str, scratch: str) -> str:
    """The digest of fixed work in a sandbox."""
    async with backend_named(name, Path(scratch)) as backend, backend.create(SandboxSpec()) as sandbox:
        await sandbox.shell.run(FIRST + "rm -f /etc/inputrc; mkdir -p /var/cache/x; chmod 700 /var/cache/x")
        return (await sandbox.pack()).digest


def readable_python() -> str:
    """An interpreter of our version that any user may run."""
    for candidate in (Path(sys.executable).resolve(), Path(f"/usr/bin/python3.{sys.version_info.minor}")):
        if all(parent.stat().st_mode & 0o001 for parent in candidate.parents) and candidate.exists():
            return str(candidate)
    raise AssertionError(f"no python3.{sys.version_info.minor} that an ordinary user may run: apt-get install python3")


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    """The sandbox's code, these tests, what they import and their image, where that user may read them."""
    from tests.support.images import cached_root  # not in the copy

    home = Path(f"/var/tmp/rollmill-test-{os.getpid()}")
    home.mkdir(mode=0o755)
    try:
        home.chmod(0o755)
        shutil.copytree(REPOSITORY / "sandbox", home / "code/sandbox")
        shutil.copytree(REPOSITORY / "tests/integration/sandbox", home / "code/tests/integration/sandbox")
        for package in ("tests", "tests/integration"):
            (home / "code" / package / "__init__.py").touch()
        third_party = Path(pytest.__file__).parent.parent
        for package in NEEDED:
            if (third_party / package).is_dir():
                shutil.copytree(third_party / package, home / "site" / package)
        shutil.copy(third_party / "py.py", home / "site/py.py")
        for distribution in needed():
            for file in distribution.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    (home / "site" / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(str(distribution.locate_file(file)), home / "site" / file)
        warm = "from sandbox.kernel.distributions import warm; warm()"  # that user cannot write compiled files there
        subprocess.run([readable_python(), "-c", warm], env={"PYTHONPATH": f"{home}/code:{home}/site"}, check=True)
        image = pack({b"": cached_root()}, home / "image.tar.zst")
        (home / "image.tar.zst").rename(home / PACKED_IMAGE.format(image.digest.removeprefix("sha256:")))
        subprocess.run(["chmod", "-R", "a+rX", str(home)], check=True)
        (home / "work").mkdir()
        os.chown(home / "work", UID, UID)
        yield home
    finally:
        shutil.rmtree(home)


def as_user(home: Path, *arguments: str, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": f"{home}/code:{home}/site", "HOME": f"{home}/work",
        "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": f"{home}/work",
    }  # fmt: skip
    return subprocess.run(
        [readable_python(), *arguments], user=UID, group=UID, extra_groups=[], env=environment, cwd=home / "code",
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", SUITE)
def test_the_suite_passes_as_an_ordinary_user(copy: Path, file: str) -> None:
    if os.getuid() != 0:
        return  # this whole session runs as an ordinary user
    options = ("-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(copy / "code"))
    done = as_user(copy, "-m", "pytest", *options, f"tests/integration/sandbox/{file}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 4 and "skipped" not in done.stdout


def test_root_and_an_ordinary_user_pack_the_same_digest(copy: Path, tmp_path: Path, isolating: str) -> None:
    if os.getuid() != 0:
        return
    done = as_user(copy, "-c", _DIGEST, isolating, f"{copy}/work/scratch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == asyncio.run(digest(isolating, str(tmp_path)))
