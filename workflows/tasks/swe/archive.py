"""A repository's archive: unpacked safely on this side, and stripped of everything that could show the future."""

from __future__ import annotations

import io
import lzma
import os
import re
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from workflows.errors import TaskDataError

MAX_UNPACKED: Final = 2 << 30
_ROOT_MODE: Final = 0o755

_DROPPED_DIRS: Final = frozenset({
    ".git", ".hg", ".svn", ".bzr", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox",
    ".nox", ".cache", ".venv", "venv", ".eggs", "node_modules", "site-packages",
})  # fmt: skip
_DROPPED_FILES: Final = re.compile(r".*\.py[co]|\.git|\.coverage|.*\.egg-link")
_BUILT_FILES: Final = re.compile(r".*\.(whl|egg)")
"""Dropped outside of tests, where a packaging project keeps some as data."""

_DAMAGED: Final = (
    OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError, ValueError, KeyError, RuntimeError,
)  # fmt: skip
"""What reading a damaged archive raises; RuntimeError for links that lead to themselves and for endless nesting."""

_BUILT: Final = frozenset({"build", "dist"})
"""Dropped at the top alone: a package may have a module directory of that name."""


def unpack(archive: Path, into: Path, *, version: str = "") -> None:
    """Unpack a tar archive below `into`, which must not exist, without what a rollout must not find.

    Version control, caches, built distributions and patches go; so does the metadata of another version than `version`
    (an installed or built newer one). A single directory around everything is taken off.

    Args:
        archive: .tar, .tar.gz, .tar.xz or .tar.bz2.
        into: a new directory.
        version: of the project, as the row says it; empty where it is unknown.

    Raises:
        TaskDataError: it is missing, damaged or too large, or a name or link in it leads out.
    """
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            if sum(member.size for member in members) > MAX_UNPACKED:
                raise TaskDataError(f"archive {archive} unpacks to more than {MAX_UNPACKED} bytes")
            into.mkdir(mode=0o700)
            for member in members:
                _extract(tar, member, into)
        _lift(into)
        _prune(into, version)
    except _DAMAGED as error:
        shutil.rmtree(into, ignore_errors=True)
        raise TaskDataError(f"archive {archive} cannot be unpacked: {type(error).__name__}: {error}") from error
    if not any(into.iterdir()):
        raise TaskDataError(f"archive {archive} holds no files")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Write one member below `into`; written out here, since `extractall(filter=...)` is newer than some Python 3.11.

    Raises:
        ValueError: its name or its link leads out, or it is neither file, directory nor link.
    """
    name = member.name.lstrip("/")
    path = into / name
    if path == into and member.isdir():
        return  # the entry "./" of an archive that was made inside its directory
    if ".." in Path(name).parts or not _inside(into, path.parent):
        raise ValueError(f"{member.name!r} leads out of the archive")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.is_file():
        path.unlink()
    if member.issym():
        if member.linkname.startswith("/") or not _inside(into, path.parent / member.linkname):
            raise ValueError(f"link {member.name!r} to {member.linkname!r} leads out of the archive")
        path.symlink_to(member.linkname)
    elif member.isreg() or member.islnk():
        if member.islnk() and (".." in Path(member.linkname).parts or member.linkname.startswith("/")):
            raise ValueError(f"hard link {member.name!r} to {member.linkname!r} leads out of the archive")
        content = tar.extractfile(member)  # of a hard link it is the content of its target, out of the archive itself
        if content is None:
            raise ValueError(f"{member.name!r} has no content")
        with content, path.open("wb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
    else:
        raise ValueError(f"{member.name!r} is neither file, directory nor link")


def _inside(root: Path, path: Path) -> bool:
    """Whether a path, with all links that it goes through, is below the root."""
    return path.resolve().is_relative_to(root.resolve())


def pack(tree: Path, prefix: str, extra: dict[str, tuple[bytes, int]], links: dict[str, str]) -> bytes:
    """One uncompressed tar: the tree's content below `prefix`, extra files (content, mode) and links by full path.

    Sorted, owned by root, with one fixed time: equal trees give equal bytes.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _walk(tree):
            info = tar.gettarinfo(str(path), arcname=str(Path(prefix) / path.relative_to(tree)))
            _plain(info)
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            elif info.isdir() or info.issym():
                tar.addfile(info)
        for name in sorted(extra):
            data, mode = extra[name]
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode, info.mtime = len(data), mode, TIME
            tar.addfile(info, io.BytesIO(data))
        for name in sorted(links):
            info = tarfile.TarInfo(name.lstrip("/"))
            info.type, info.linkname, info.mtime = tarfile.SYMTYPE, links[name], TIME
            tar.addfile(info)
    return buffer.getvalue()


TIME: Final = 946_684_800
"""2000-01-01T00:00:00Z: the date of every file and of the one commit."""


def _plain(info: tarfile.TarInfo) -> None:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = TIME
    info.mode = _ROOT_MODE if info.isdir() or info.mode & 0o100 else 0o644
    if info.islnk():  # a hard link of the archive is written as the file that it is
        info.type = tarfile.REGTYPE
    info.name = info.name.lstrip("/")


def _walk(tree: Path) -> Iterator[Path]:
    yield tree
    for directory, names, files in os.walk(tree):
        names.sort()
        for name in sorted([*names, *files]):
            yield Path(directory) / name


def _lift(tree: Path) -> None:
    """Take off one directory that holds everything, as hosting sites' archives have it."""
    entries = list(tree.iterdir())
    if len(entries) != 1 or entries[0].is_symlink() or not entries[0].is_dir():
        return
    inner = tree.with_name(f"{tree.name}.inner")
    entries[0].rename(inner)
    tree.rmdir()
    inner.rename(tree)


def _prune(tree: Path, version: str) -> None:
    for directory, names, files in os.walk(tree, topdown=True):
        here = Path(directory)
        for name in list(names):
            path = here / name
            if path.is_symlink():
                continue
            old = name.endswith((".egg-info", ".dist-info")) and not _is_version(path, version)
            dropped = name in _DROPPED_DIRS and not (name.isidentifier() and (path / "__init__.py").is_file())
            if dropped or old or (here == tree and name in _BUILT and _is_built(path)):
                names.remove(name)
                shutil.rmtree(path)
        for name in files:
            path = here / name
            built = _BUILT_FILES.fullmatch(name) and "tests" not in here.relative_to(tree).parts
            if built or _DROPPED_FILES.fullmatch(name) or not (path.is_symlink() or stat.S_ISREG(path.lstat().st_mode)):
                path.unlink()


def _is_version(metadata: Path, version: str) -> bool:
    """Whether packaging metadata is of the version that the row names; what does not say is kept out."""
    for name in ("PKG-INFO", "METADATA"):
        if (metadata / name).is_file():
            said = metadata_field((metadata / name).read_text(errors="replace"), "Version")
            return not version or said == version or said.startswith((f"{version}.", f"{version}+", f"{version}rc"))
    return False


def _is_built(directory: Path) -> bool:
    """A build or dist directory of a packaging tool; a package of that name has an __init__.py."""
    return not (directory / "__init__.py").exists()


def metadata_field(text: str, name: str) -> str:
    """A field of PKG-INFO or METADATA; empty where it is absent."""
    match = re.search(rf"^{name}:[ \t]*(.*)$", text.partition("\n\n")[0], re.MULTILINE | re.IGNORECASE)
    return match[1].strip() if match else ""
