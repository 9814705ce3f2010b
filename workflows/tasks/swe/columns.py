"""The columns of a row of task=swe: SWE-bench's, with `archive` and `requirements`; checked before anything is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stages import sharedfs
from stages.protocols import Row

PRIVATE: Final = frozenset({
    "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "test_files", "hints_text", "hints", "test_cmd",
})  # fmt: skip
"""What shows the solution or how it is graded; the names of the tests are hints."""

PUBLIC: Final = frozenset({
    "instance_id", "task_id", "repo", "version", "base_commit", "problem_statement", "source_root", "archive",
    "archive_sha256", "requirements",
})  # fmt: skip
"""What INIT and RUN may know. A column that is in neither list is dropped: it might be the solution by another name."""

_TEXTS: Final = ("instance_id", "repo", "problem_statement", "patch", "test_patch", "archive")
_OPTIONAL_TEXTS: Final = ("version", "base_commit", "source_root")
_LISTS: Final = ("FAIL_TO_PASS", "PASS_TO_PASS", "requirements")


def texts(value: Any) -> list[str]:
    """A list of texts, also where it comes as JSON in a text, as SWE-bench's files have it.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("expected a list of texts")
    return value


def wrong(row: Mapping[str, Any]) -> str:
    """What keeps a line of the data file from being a row; empty where nothing does."""
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            return f"column {name} is missing" if name not in row else f"column {name} must be a text"
    for name in _OPTIONAL_TEXTS:
        if not isinstance(row.get(name, ""), str):
            return f"column {name} must be a text"
    for name in _LISTS:
        try:
            texts(row[name])
        except KeyError:
            return f"column {name} is missing"
        except (ValueError, RecursionError) as error:
            return f"column {name}: {error}"
    root = str(row.get("source_root", ""))
    if root.startswith("/") or ".." in root.split("/"):
        return f"column source_root: {root!r} is not inside the repository"
    if "\0" in row["archive"] or "\0" in root:
        return "column archive or source_root holds a zero byte"
    if not row["instance_id"]:
        return "column instance_id is empty"
    if not texts(row["FAIL_TO_PASS"]):
        return "column FAIL_TO_PASS is empty: nothing would show that the issue is mended"
    return ""


def completed(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row's known columns with its `task_id`, the archive's absolute path and the digest of its content.

    The digest is empty where the archive cannot be read: preparing then says so.
    """
    path = folder / row["archive"]
    known = {name: value for name, value in row.items() if name in PUBLIC or name in PRIVATE}
    return {**known, "task_id": row["instance_id"], "archive": str(path), "archive_sha256": digest_of(path)}


def digest_of(archive: Path) -> str:
    """sha256 of a file in hexadecimal, or an empty text where it cannot be read."""
    try:
        return hashlib.sha256(sharedfs.read_bytes(archive)).hexdigest()
    except (OSError, ValueError):  # a name that no file can have, too
        return ""


def setup_key(row: Row, version: int, python: str) -> str:
    """Names the environment: all that preparing depends on, and no private column."""
    parts = [
        version, python, row.get("archive_sha256", ""), row["repo"], row.get("version", ""), row.get("base_commit", ""),
        row.get("source_root", ""), texts(row["requirements"]),
    ]  # fmt: skip
    if not row.get("archive_sha256"):
        parts.append(row["archive"])
    return "swe-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()
