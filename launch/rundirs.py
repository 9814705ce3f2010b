"""Which run directory a verb is about: the one given, else the newest one here."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.errors import CommandError

_PLACES = ("runs/*/manifest.json", "runs/*/*/manifest.json")
"""Where launches from this directory put their runs; the second is a sweep's points."""


def find_run_dir(given: str | None, cwd: Path | None = None) -> Path:
    """The run directory of a verb.

    Raises:
        CommandError: the one given is no run directory, or there is none here.
    """
    here = cwd or Path.cwd()
    if given is not None:
        return _checked(here / given)
    newest = max((file for place in _PLACES for file in here.glob(place)), key=_age, default=None)
    if newest is None:
        raise CommandError(f"there is no run under {here / 'runs'}; name one: rollmill VERB RUN_DIR")
    sys.stderr.write(f"rollmill: the newest run here is {newest.parent}\n")
    return newest.parent


def _checked(run_dir: Path) -> Path:
    if (run_dir / "manifest.json").is_file():
        return run_dir
    what = "is not a directory" if not run_dir.is_dir() else "has no manifest.json, so no run was ever launched in it"
    raise CommandError(f"{run_dir} {what}; give the directory that run_dir=... named")


def _age(manifest: Path) -> float:
    try:
        return manifest.stat().st_mtime
    except FileNotFoundError:
        return 0.0
