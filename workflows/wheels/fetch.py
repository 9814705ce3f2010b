"""Resolves requirements for a sandbox's Python and downloads the wheels: by pip, outside of sandboxes.

pip is run and never imported: it offers no API. Its resolver evaluates environment markers for the interpreter it runs
on, also where another is asked for; the few lines below hand it the markers of the sandbox's Python instead, so that a
worker on 3.11 gets for an image with 3.9 what pip on 3.9 would have chosen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from workflows.wheels.errors import UnresolvableError, WheelError
from workflows.wheels.target import PythonTarget

_PIP: Final = """
import json, sys
from pip._vendor.packaging import markers
given = json.loads(sys.argv.pop(1))
markers.default_environment = lambda: dict(given)
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

_PASSED: Final = re.compile(
    r"PIP_\w+|UV_\w+|(?i:https?_proxy|all_proxy|no_proxy)|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|NETRC|XDG_(CONFIG|CACHE)_(HOME|DIRS)|HOME|PATH|LANG|TMPDIR|LD_LIBRARY_PATH"
)
"""Variables that reach the fetch: what pip and a site's registry, proxy and certificates need, and nothing else."""

_UNWANTED: Final = (
    "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_DEST", "PIP_REQUIRE_VIRTUALENV", "PIP_NO_DEPS",
    "PIP_QUIET",
)  # fmt: skip
"""Settings of pip that say where to install, or would change what is fetched and said."""

_FROM_UV: Final = (
    ("PIP_INDEX_URL", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    ("PIP_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    ("PIP_FIND_LINKS", ("UV_FIND_LINKS",)),
)
"""A site that has told uv alone where its registry is has told us too."""

_UNREACHABLE: Final = "Retrying (Retry("
"""What pip says of a registry that did not answer, unless it is told to try once alone."""

_REFUSED: Final = re.compile(
    r"(?i)no matching distribution|resolutionimpossible|conflicting dependencies|invalid requirement|expected .*version"
)


def fetch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of `environ` the fetch is given, with uv's registry settings said in pip's words where pip has none."""
    env = {name: value for name, value in environ.items() if _PASSED.fullmatch(name)}
    for name, others in _FROM_UV:
        value = next((env[other] for other in others if env.get(other)), None)
        if value is not None and name not in env:
            env[name] = re.sub(r"(^|\s)[A-Za-z0-9_-]+=(?=\w+://)", r"\1", value).replace(",", " ")
    for name in _UNWANTED:
        env.pop(name, None)
    if env.get("PIP_RETRIES", "").strip() == "0":
        env["PIP_RETRIES"] = "1"
    return env


def fetch(
    requirements: Sequence[str], target: PythonTarget, directory: Path, *, timeout_s: float, environ: Mapping[str, str]
) -> list[Path]:
    """Download one wheel for each distribution that the requirements need; source distributions are never built.

    Args:
        requirements: in the words of PEP 508, each a name; none is a place to fetch from. None at all is no wheel.
        target: whose wheels.
        directory: an empty one.
        timeout_s: of the whole fetch.
        environ: registry settings are taken from it (`fetch_environment`).

    Raises:
        UnresolvableError: there is no such set of wheels, or a requirement names a place: pip would run its code.
        WheelError: the registry was not reached, or pip broke.
    """
    needed = [name for name in (_needed(requirement, target) for requirement in requirements) if name]
    if not needed:
        return []
    flags = [flag for platform in target.platforms for flag in ("--platform", platform)]
    implementation = "pp" if target.markers["implementation_name"] == "pypy" else "cp"
    command = [
        sys.executable, "-I", "-c", _PIP, msgspec.json.encode(target.markers).decode(), "download",
        "--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--only-binary", ":all:",
        "--python-version", target.version, "--implementation", implementation, *flags,
        "--dest", str(directory), "--", *requirements,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=fetch_environment(environ), cwd=directory, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"requirements {_named(requirements)}: not fetched within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise _failure(requirements, done.stdout, done.stderr)
    files = sorted(directory.glob("*.whl"))
    missing = set(needed) - {canonicalize_name(file.name.partition("-")[0]) for file in files}
    if missing:
        raise UnresolvableError(f"requirements {_named(requirements)}: no wheel of {', '.join(sorted(missing))} came")
    return files


def _needed(requirement: str, target: PythonTarget) -> str:
    """The distribution that a requirement names, or nothing where its marker is not of this target.

    Raises:
        UnresolvableError: it is an option, a path or a URL.
    """
    if len(requirement.splitlines()) != 1:
        raise UnresolvableError(f"requirement {requirement!r} is not one line")
    try:
        parsed = Requirement(requirement)
    except (InvalidRequirement, RecursionError) as error:
        said = str(error).splitlines()[0] if str(error) else "it is nested too deeply"
        raise UnresolvableError(f"requirement {requirement!r} is not one of PEP 508: {said}") from error
    if parsed.url:
        raise UnresolvableError(f"requirement {requirement!r} names a place; only names of distributions are fetched")
    if parsed.marker is not None and not parsed.marker.evaluate({**target.markers, "extra": ""}):
        return ""
    return canonicalize_name(parsed.name)


def _failure(requirements: Sequence[str], stdout: str, stderr: str) -> WheelError:
    if "No module named" in stderr and "pip" in stderr:
        return WheelError(f"{sys.executable} has no pip; install it into rollmill's own environment")
    said = [line.strip() for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.strip().splitlines()
    message = f"requirements {_named(requirements)}: {' '.join(said[-2:])[:500] or 'pip failed and said nothing'}"
    if _UNREACHABLE in stdout + stderr:
        return WheelError(f"{message} (a registry did not answer)")
    return UnresolvableError(message) if _REFUSED.search(stderr) else WheelError(message)


def _named(requirements: Sequence[str]) -> str:
    return ", ".join(requirements)[:200]


def own_environ() -> dict[str, str]:
    """This process's environment."""
    return dict(os.environ)
