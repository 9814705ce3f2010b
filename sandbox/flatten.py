"""Layers without overlayfs: a stack copied into one plain directory, and the way back to a layer of changes."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sandbox.scratch import remove_tree
from sandbox.uppertree import OPAQUE_XATTR


def flatten(layers: Sequence[Path], target: Path) -> None:
    """Copy unpacked layers, lowest first, over `target`, carrying out their deletions."""
    for layer in layers:
        _apply(layer, target)


def changes(layers: Sequence[Path], root: Path, stage: Path) -> None:
    """Copy `root` to the new directory `stage` in overlay format: whiteouts stand for what the layers had and it lacks.

    What is unchanged is copied too: the layer is larger than an overlay's would be, and means the same.
    """
    shutil.copytree(root, stage, symlinks=True, ignore=_special, ignore_dangling_symlinks=True)
    for layer in layers:
        for directory, directories, files in os.walk(layer):
            below = Path(directory).relative_to(layer)
            for name in (*directories, *files):
                _hide_missing(layer / below / name, stage / below / name)


def _apply(source: Path, target: Path) -> None:
    for entry in sorted(source.iterdir()):
        there = target / entry.name
        mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode):
            if _is_opaque(entry) or not _is_real_directory(there):
                _remove(there)
            there.mkdir(exist_ok=True)
            _apply(entry, there)
            there.chmod(stat.S_IMODE(mode))
        elif stat.S_ISLNK(mode):
            _remove(there)
            there.symlink_to(entry.readlink())
        else:
            _remove(there)
            if stat.S_ISREG(mode):
                shutil.copy2(entry, there)


def _hide_missing(lower: Path, there: Path) -> None:
    mode = lower.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
        return
    if _is_real_directory(there.parent) and not os.path.lexists(there):
        os.mknod(there, stat.S_IFCHR, 0)


def _special(directory: str, names: list[str]) -> set[str]:
    """Sockets, FIFOs and devices: a layer cannot hold them, and copying a FIFO would wait for ever."""
    found = set()
    for name in names:
        with suppress(OSError):
            mode = (Path(directory) / name).lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                found.add(name)
    return found


def _is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, OPAQUE_XATTR) == b"y"
    except OSError:
        return False


def _is_real_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _remove(path: Path) -> None:
    if _is_real_directory(path):
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
