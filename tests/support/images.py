"""A small image for tests: Debian packages unpacked into a root file system, without root or debootstrap."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from sandbox.scratch import remove_tree

PACKAGES = (
    "base-files", "base-passwd", "bash", "coreutils", "dash", "diffutils", "findutils", "git", "grep", "gzip",
    "hostname", "libc-bin", "mawk", "patch", "procps", "python3", "sed", "tar", "util-linux",
)  # fmt: skip
"""What the shipped tasks need in an image: bash, the usual programs, git and Python."""

_MERGED = ("bin", "sbin", "lib", "lib64")
_LEFT_OUT = (
    "./usr/share/doc/*",
    "./usr/share/man/*",
    "./usr/share/locale/*",
    "./usr/share/info/*",
    "./usr/share/lintian/*",
)


def debian_root(target: Path, work: Path, packages: tuple[str, ...] = PACKAGES) -> Path:
    """Unpack Debian packages with all that they depend on into the new directory `target`.

    apt resolves and fetches with a state of its own, so that no root and no lock of the system is needed; no maintainer
    script runs. Takes some 20 s.

    Args:
        target: a new directory; the root file system.
        work: where the packages are fetched to.

    Raises:
        RuntimeError: apt cannot fetch; holds what it said.
    """
    state, cache = work / "state", work / "cache"
    for directory in (state / "lists/partial", cache / "archives/partial"):
        directory.mkdir(parents=True, exist_ok=True)
    status = state / "status"
    status.write_bytes(b"")
    options = [
        f"Dir::State={state}", f"Dir::State::status={status}", f"Dir::Cache={cache}", "APT::Sandbox::User=",
        "APT::Install-Recommends=false", "Dir::Log=/dev/null", "Debug::NoLocking=true",
    ]  # fmt: skip
    apt = ["apt-get", "-qq", "-y", *(word for option in options for word in ("-o", option))]
    _run(*apt, "update")
    _run(*apt, "--download-only", "install", *packages)
    target.mkdir(mode=0o755)
    for name in _MERGED:
        (target / "usr" / name).mkdir(parents=True, mode=0o755)
        (target / name).symlink_to(f"usr/{name}")
    for package in sorted((cache / "archives").glob("*.deb")):
        _unpack(package, target)
    for name in ("passwd", "group"):
        shutil.copyfile(target / f"usr/share/base-passwd/{name}.master", target / "etc" / name)
    (target / "usr/bin/awk").symlink_to("mawk")
    (target / "work").mkdir(mode=0o755)
    remove_tree(cache)
    return target


def cached_root(base: Path | None = None) -> Path:
    """The image of this machine and user, built once; the name holds what it was built from."""
    base = base or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollmill"
    made_from = hashlib.sha256("\n".join((*PACKAGES, Path(__file__).read_text())).encode()).hexdigest()[:12]
    root = base / f"test-image-{made_from}"
    if root.is_dir():
        return root
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    stage = base / f".build-{os.getpid()}-{os.urandom(4).hex()}"
    stage.mkdir(mode=0o700)
    try:
        debian_root(stage / "root", stage)
        try:
            (stage / "root").rename(root)
        except OSError:
            if not root.is_dir():
                raise
    finally:
        remove_tree(stage)
    return root


def _unpack(package: Path, target: Path) -> None:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as reading:
        excluded = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
        options = ["--keep-directory-symlink", "--no-same-owner", "-p", *excluded]
        _run("tar", "-x", "-C", str(target), *options, stdin=reading.stdout)
    if reading.returncode != 0:
        raise RuntimeError(f"{package.name} cannot be read by dpkg-deb")


def _run(*command: str, stdin: object = subprocess.DEVNULL) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=stdin, check=False)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[-1000:]}")
