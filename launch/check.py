"""Start-up check that all five packages come from one place: their names are common, and pip overwrites."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from launch.errors import InstallationError

PACKAGES = ("launch", "workflows", "stages", "sandbox", "conf")


def find_package(name: str) -> Path | None:
    """The `__init__.py` that `import name` would run; None where there is no such package."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def check_packages(names: Iterable[str] = PACKAGES, find: Callable[[str], Path | None] = find_package) -> Path:
    """Return the one folder that holds all packages; the first name given is the one that is trusted.

    Raises:
        InstallationError: names the foreign or missing package, its file and the folder where it should be.
    """
    home: Path | None = None
    for name in names:
        file = find(name)
        if file is None:
            raise InstallationError(
                f"package {name} is missing beside {home}; install rollmill again in a fresh environment"
            )
        place = file.parent.parent
        if home is None:
            home = place
        elif place != home:
            raise InstallationError(
                f"package {name} comes from {file}, the others from {home}; "
                "another distribution has the same name: install rollmill in an environment of its own"
            )
    if home is None:
        raise InstallationError("no packages to check")
    return home
