"""A row's patch on files that no agent has seen: whole files out, so that nothing of a workspace is trusted for them.

The hidden patch is applied where no agent was, by the same rules as the agents' own patches (`sandbox.patches`); a
worker need not have git.
"""

from __future__ import annotations

from collections.abc import Callable

from sandbox.history import Before
from sandbox.patches import FilePatch, Patched, parse
from workflows.errors import TaskDataError

Read = Callable[[str], bytes | None]
"""The content of a file by its path from the repository's root, or None where there is none."""


def apply(patch: str, read: Read) -> dict[str, bytes | None]:
    """The files that the patch touches as they are afterwards; None for one that it deletes.

    Args:
        patch: may be empty: then nothing changes.
        read: the files before.

    Raises:
        TaskDataError: the patch is none, or does not fit the files, or holds a binary change or a link.
    """
    try:
        patched = Patched(_parsed(patch), lambda name: Before(name, read(name), 0o644))
    except (ValueError, OSError) as error:
        raise TaskDataError(f"patch: {error}") from error
    return {name: data for name, (data, _) in patched.afters.items()}


def paths(patch: str) -> list[str]:
    """The files that a patch touches, by their old and new names.

    Raises:
        TaskDataError: as of `apply`.
    """
    try:
        names = [name for one in _parsed(patch) for name in (one.source, one.target) if name]
    except ValueError as error:
        raise TaskDataError(f"patch: {error}") from error
    return list(dict.fromkeys(names))


def _parsed(patch: str) -> list[FilePatch]:
    return parse(patch.encode()) if patch.strip() else []
