"""Which changed paths a pack takes: the declared ones, less the excluded. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from typing import Literal

from sandbox.errors import LayerError

Verdict = Literal["take", "way", "leave"]


class Selection:
    """Decides for each path relative to the root.

    Args:
        paths: absolute paths whose changes are taken; "/" for all.
        exclude: globs; one with a slash meets the whole path (leading slash or not), one without a name at any depth.

    Raises:
        LayerError: a path is not absolute or climbs.
    """

    def __init__(self, paths: Sequence[str] = ("/",), exclude: Sequence[str] = ()) -> None:
        self._paths = [_parts(path) for path in paths]
        whole = [translate(glob.lstrip("/")) for glob in exclude if "/" in glob]
        names = [translate(glob) for glob in exclude if "/" not in glob]
        self._whole = re.compile("|".join(whole).encode()) if whole else None
        self._names = re.compile("|".join(names).encode()) if names else None

    def verdict(self, path: tuple[bytes, ...]) -> Verdict:
        """Whether the path is taken, lies on the way to one that is, or is left out."""
        if self._names and self._names.match(path[-1]):
            return "leave"
        if self._whole and self._whole.match(b"/".join(path)):
            return "leave"
        if any(path[: len(wanted)] == wanted for wanted in self._paths):
            return "take"
        if any(wanted[: len(path)] == path for wanted in self._paths):
            return "way"
        return "leave"

    def next_parts(self, path: tuple[bytes, ...]) -> list[bytes]:
        """The names that lead on from a path on the way."""
        return sorted({wanted[len(path)] for wanted in self._paths if wanted[: len(path)] == path and wanted != path})

    def is_start(self, path: tuple[bytes, ...]) -> bool:
        """The path is one of the declared ones."""
        return path in self._paths


def _parts(path: str) -> tuple[bytes, ...]:
    parts = tuple(part for part in path.encode("utf-8", "surrogateescape").split(b"/") if part not in (b"", b"."))
    if not path.startswith("/") or b".." in parts:
        raise LayerError(f"{path!r} is not an absolute path without '..'", boundary="layers", path=path)
    return parts
