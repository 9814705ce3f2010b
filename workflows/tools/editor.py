"""The editor tool: files viewed by lines, made, changed in one place and changed back, as agents for code know it."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sandbox.errors import FilesError
from workflows.tools import arguments

if TYPE_CHECKING:
    from sandbox.protocols import Files, Sandbox

NAME = "str_replace_editor"

SCHEMA = arguments.schema(
    NAME, "View and edit files.",
    {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
        "path": {"type": "string", "description": "Absolute."},
        "file_text": {"type": "string"},
        "old_str": {"type": "string", "description": "Occurs once."},
        "new_str": {"type": "string"},
        "insert_line": {"type": "integer", "description": "Insert new_str after it."},
        "view_range": {"type": "array", "items": {"type": "integer"}, "description": "[first, last]; -1 is the end."},
    },
    ["command", "path"],
)  # fmt: skip

_AROUND = 4
"""Lines shown around an edit."""
_ENTRIES = 500
_OURS = frozenset({errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What no agent's mistake can be."""


async def call(sandbox: Sandbox, given: Mapping[str, Any], timeout_s: float) -> str:
    """Do what `given["command"]` says, and return what the agent reads.

    Wrong arguments and what the files do not allow come back as text too: the policy that wrote them can mend them.

    Raises:
        SandboxError: the fault is not the agent's.
    """
    del timeout_s  # bounded by the files' sizes
    wrong = arguments.wrong_arguments(SCHEMA, given) or _missing(given)
    if wrong:
        return wrong
    try:
        return await _edit(sandbox.files, given)
    except FilesError as error:
        return mistake(error)


def mistake(error: FilesError) -> str:
    """The error as text for the agent; raised again where it is none of the agent's."""
    if error.detail.get("errno") in _OURS:
        raise error
    return f"error: {error}"


def _missing(given: Mapping[str, Any]) -> str | None:
    """What a command needs beside its path."""
    needs = {"create": ("file_text",), "str_replace": ("old_str",), "insert": ("insert_line", "new_str")}
    command = given["command"]
    for key in needs.get(command, ()):
        if given.get(key) is None:
            return f"error: {command} needs {key}"
    if not given["path"].startswith("/"):
        return f"error: path is absolute; got {given['path']}: did you mean /{given['path']}?"
    span = given.get("view_range")
    if span is not None and (len(span) != 2 or not all(type(number) is int for number in span)):
        return f"error: view_range is two line numbers; got {span}"
    return None


async def _edit(files: Files, given: Mapping[str, Any]) -> str:
    path = given["path"]
    match given["command"]:
        case "view":
            return await _view(files, path, given.get("view_range"))
        case "create":
            await files.create(path, given["file_text"])
            return f"{path} was made."
        case "str_replace":
            old, new = given["old_str"], given.get("new_str") or ""
            before = await files.read_text(path)
            await files.replace(path, old, new)
            at = before[: max(0, before.find(old))].count("\n") + 1
            return await _shown(files, path, at, at + new.count("\n"))
        case "insert":
            line, new = given["insert_line"], given["new_str"]
            await files.insert(path, line, new)
            return await _shown(files, path, line + 1, line + 1 + new.removesuffix("\n").count("\n"))
        case _:
            await files.undo(path)
            return f"The last edit of {path} was taken back."


async def _shown(files: Files, path: str, first: int, last: int) -> str:
    """The lines of an edit and those around it."""
    try:
        lines = await files.view(path, max(1, first - _AROUND), last + _AROUND)
    except FilesError:  # nothing is left there
        return f"{path} was edited."
    return f"{path} was edited:\n{lines}"


async def _view(files: Files, path: str, span: list[int] | None) -> str:
    try:
        first, last = span or (1, None)
        return await files.view(path, first, last)
    except FilesError as error:
        if error.detail.get("errno") != errno.EISDIR:
            raise
    return await _tree(files, path)


async def _tree(files: Files, path: str) -> str:
    """Two levels of a directory, without hidden names."""
    lines: list[str] = []
    for entry in await files.list(path):
        if entry.name.startswith("."):
            continue
        lines.append(entry.name + ("/" if entry.kind == "directory" else ""))
        if entry.kind == "directory" and len(lines) < _ENTRIES:
            try:
                below = await files.list(f"{path.rstrip('/')}/{entry.name}")
            except FilesError as error:  # a name that is no text is shown otherwise than it is; or it has just gone
                mistake(error)
                continue
            lines += [
                f"{entry.name}/{one.name}" + ("/" if one.kind == "directory" else "")
                for one in below
                if not one.name.startswith(".")
            ]
    more = [f"[{len(lines) - _ENTRIES} more]"] if len(lines) > _ENTRIES else []
    return "\n".join(lines[:_ENTRIES] + more) or "[no files]"
