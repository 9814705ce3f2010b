"""What a repository says of itself: its names, its import packages, its scripts; and who must not bring it again."""

from __future__ import annotations

import configparser
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stages.protocols import Row
from workflows.tasks.swe.archive import metadata_field
from workflows.wheels.cache import Lock, canonical
from workflows.wheels.errors import UnresolvableError
from workflows.wheels.install import Entry, script

_BESIDE = frozenset({
    "tests", "test", "testing", "docs", "doc", "examples", "example", "benchmarks", "scripts", "tools",
})  # fmt: skip
"""Directories that hold no package of the project's own, although they may look like one."""


class Project(msgspec.Struct, frozen=True):
    """One project.

    Args:
        name: of its distribution.
        version: as its metadata says, else as the row says.
        names: canonical names under which the index may know it.
        packages: its import packages.
        entry_points: the sections of its entry_points.txt.
        metadata: whether its source root holds metadata of its own, so that it can be asked for its version.
    """

    name: str
    version: str
    names: frozenset[str]
    packages: frozenset[str]
    entry_points: dict[str, dict[str, str]]
    metadata: bool


def read(row: Row, tree: Path) -> Project:
    """The project in an unpacked repository.

    Args:
        row: names it too.
        tree: the repository.
    """
    source = tree / row.get("source_root", "")
    said = [_text(tree / "PKG-INFO"), *(_text(info) for info in source.glob("*.egg-info/PKG-INFO"))]
    configured = [_pyproject(tree).get("project", {}).get("name", ""), _setup(tree).get("metadata", {}).get("name", "")]
    short = str(row["repo"]).rpartition("/")[2]
    names = [*(metadata_field(text, "Name") for text in said), *configured]
    version = next(filter(None, (metadata_field(text, "Version") for text in said)), "") or str(row.get("version", ""))
    return Project(
        name=next((name for name in names if name), short),
        version="".join(letter for letter in version if letter.isalnum() or letter in ".+!_") or "0",
        names=frozenset(canonical(name) for name in (*names, short) if name),
        packages=frozenset(path.parent.name for path in source.glob("*/__init__.py")) - _BESIDE,
        entry_points=_entry_points(tree, source),
        metadata=any(source.glob("*.egg-info")),
    )


def scripts(project: Project, interpreter: str) -> Iterator[Entry]:
    """The project's commands, as an editable installation would have them."""
    for name, value in project.entry_points.get("console_scripts", {}).items():
        made = script(name, value, interpreter)
        if made is not None:
            yield made


def distribution_files(project: Project) -> dict[str, str]:
    """A minimal `.dist-info` by path below site-packages, for a project that has no metadata of its own beside it."""
    info = f"{canonical(project.name).replace('-', '_')}-{project.version}.dist-info"
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(points.items()))
        for group, points in sorted(project.entry_points.items())
    )
    return {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project.name}\nVersion: {project.version}\n",
        f"{info}/INSTALLER": "rollmill\n",
        f"{info}/entry_points.txt": points,
    }


def refuse_own(project: Project, lock: Lock) -> None:
    """Refuse a lock with the project's own distribution: a later version would be there to copy from.

    Raises:
        UnresolvableError: it has.
    """
    for wheel in lock.wheels:
        if canonical(wheel.name) in project.names:
            raise UnresolvableError(
                f"requirements {', '.join(lock.requirements)} bring the project's own distribution, {wheel.name} "
                f"{wheel.version}: take what needs it out of the row's requirements"
            )


def refuse_packages(project: Project, entry: Entry, site: str, wheel: str) -> None:
    """The same for a distribution of another name that holds the project's packages.

    Raises:
        UnresolvableError: this entry is of one.
    """
    top = entry.path.removeprefix(f"{site}/").split("/")[0] if entry.path.startswith(f"{site}/") else ""
    if top in project.packages:
        raise UnresolvableError(f"wheel {wheel} brings the project's own package {top}: {entry.path}")


def _entry_points(tree: Path, source: Path) -> dict[str, dict[str, str]]:
    """As built metadata says, else as pyproject.toml and setup.cfg say."""
    found: dict[str, dict[str, str]] = {}
    for path in source.glob("*.egg-info/entry_points.txt"):
        found.update(_sections(_text(path)))
    if found:
        return found
    project = _pyproject(tree).get("project", {})
    found.update({"console_scripts": dict(project.get("scripts", {}))} if project.get("scripts") else {})
    found.update({group: dict(points) for group, points in project.get("entry-points", {}).items()})
    for group, text in _setup(tree).get("options.entry_points", {}).items():
        found.setdefault(group, {}).update(_sections(f"[{group}]\n{text.strip()}\n").get(group, {}))
    return found


def sections(path: Path) -> dict[str, dict[str, str]]:
    """The sections of an .ini file; none where there is none, or nobody can read it."""
    return _sections(_text(path))


def pyproject(tree: Path) -> Mapping[str, Any]:
    """The repository's pyproject.toml, likewise."""
    return _pyproject(tree)


def _sections(text: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error:  # what a project's own tools would not read either
        return {}
    return {section: {name: value or "" for name, value in parser.items(section)} for section in parser.sections()}


def _setup(tree: Path) -> dict[str, dict[str, str]]:
    return _sections(_text(tree / "setup.cfg"))


def _pyproject(tree: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(_text(tree / "pyproject.toml"))
    except tomllib.TOMLDecodeError:
        return {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() and not path.is_symlink() else ""
