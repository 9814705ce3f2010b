"""`python -P -m tests.support.cluster.unpack SUITE`: another Debian suite's Slurm in a directory, whose path it prints.

The packages come from the mirror that this machine's apt is configured for and are checked against the suite's signed
index. They are unpacked, not installed, and their programs are told to find loader and libraries below the directory.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.cluster.errors import ClusterError
from tests.support.cluster.roots import PARENT

WANTED = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "slurm-wlm-mysql-plugin", "patchelf")
PREFIXES = ("lib", "slurm", "zlib1g", "patchelf")
"""Of what these depend on only libraries are taken; shell, init system and the like are the machine's own."""
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
DONE = "unpacked"
"""A file that is written last: the directory is whole."""


def call(argv: Sequence[str | Path]) -> str:
    """What a program prints.

    Raises:
        ClusterError: it failed, or is not there.
    """
    try:
        return subprocess.run(list(argv), check=True, capture_output=True, text=True, cwd="/", timeout=600).stdout
    except FileNotFoundError as error:
        raise ClusterError(f"unpacking Slurm: {argv[0]} is not there; this needs Debian's apt") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip() or error.stdout.strip()).splitlines()[-1:]
        raise ClusterError(f"unpacking Slurm: {argv[0]} ended with {error.returncode}: {said}") from error


class Apt:
    """apt with a state of its own: nothing counts as installed, and nothing of the system changes.

    Args:
        directory: where its lists and packages lie.
        suite: Debian's name of a release.
    """

    def __init__(self, directory: Path, suite: str) -> None:
        self.packages = directory / "packages"
        for part in ("state/lists/partial", "cache/archives/partial"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        self.packages.mkdir(exist_ok=True)
        (directory / "status").touch()
        sources = directory / "sources.list"
        sources.write_text(f"deb [signed-by={KEYRING}] {mirror()} {suite} main\n")
        settings = {
            "Dir::State": directory / "state",
            "Dir::State::status": directory / "status",
            "Dir::Cache": directory / "cache",
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferencesparts": "-",
            "APT::Sandbox::User": "root",
        }
        self._options = [text for key, value in settings.items() for text in ("-o", f"{key}={value}")]
        call(["apt-get", *self._options, "update"])

    def fetch(self) -> list[Path]:
        """Download what we want and the libraries that it needs, one package a file."""
        plan = call(["apt-get", *self._options, "install", "-s", "--no-install-recommends", *WANTED])
        names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
        chosen = [name for name in names if name.startswith(PREFIXES) and "pam-modules" not in name]
        # `download` writes to the current directory, and knows no option for another.
        script = 'cd "$1" && shift && exec apt-get "$@"'
        call(["sh", "-c", script, "sh", self.packages, *self._options, "-q", "download", *chosen])
        return sorted(self.packages.glob("*.deb"))


def mirror() -> str:
    """The mirror from which this machine gets Debian's main archive."""
    rows = call(["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE) $(COMPONENT)", "Created-By: Packages"])
    for row in rows.splitlines():
        site, release, component = row.split()
        if component == "main" and release.isalpha():  # not -updates, -security, -backports
            return site
    raise ClusterError("unpacking Slurm: apt on this machine has no mirror of Debian's main archive")


def unpack(suite: str, directory: Path) -> None:
    """Fill the directory, unless it is whole already.

    Raises:
        ClusterError: apt, the index or a package could not be had.
    """
    if (directory / DONE).exists():
        return
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, mode=0o755)
    for package in Apt(directory / "apt", suite).fetch():
        call(["dpkg-deb", "--extract", package, directory])
    shutil.rmtree(directory / "apt")
    relocate(directory)
    (directory / DONE).write_text(f"{suite}\n")


def relocate(directory: Path) -> None:
    """Let every Slurm program and plugin find its loader and libraries below the directory."""
    libraries = directory / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    plugins = libraries / "slurm-wlm"
    loader = next(path for path in (*directory.glob("usr/lib64/ld-*"), *libraries.glob("ld-linux*")) if path.exists())
    for program in directory.glob("usr/*bin/*-wlm"):  # Debian's alternatives, which an unpacked package does not set up
        program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)
    programs = [*directory.glob("usr/sbin/slurm*"), *directory.glob("usr/bin/s*")]
    path = f"{plugins}:{libraries}"
    # patchelf is of that suite too: it runs by the suite's own loader.
    patch: list[str | Path] = [
        loader,
        "--library-path",
        libraries,
        directory / "usr" / "bin" / "patchelf",
        "--force-rpath",
    ]
    for file in _binaries(programs):
        call([*patch, "--set-rpath", path, "--set-interpreter", loader, file])
    for file in _binaries(plugins.glob("*.so*")):
        call([*patch, "--set-rpath", path, file])


def _binaries(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if file.is_file() and not file.is_symlink() and file.read_bytes()[:4] == b"\x7fELF"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", help="trixie has Slurm 24.11")
    parser.add_argument("--directory", type=Path, help="default: the suite's name where the test clusters lie")
    given = parser.parse_args(arguments)
    directory = (given.directory or PARENT / given.suite).absolute()
    try:
        unpack(given.suite, directory)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
