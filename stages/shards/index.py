"""The index as a reader sees it: the lines of all parts in seq order, zombies cut off, torn tails not there yet.

Rule: line `seq` may come only from its owner, the highest (epoch, part) whose header says `after_seq` < seq. So a
higher header cuts everything lower at its after_seq, whoever goes on appending there; a seq that was given out is not
given again. Only the standard library: trainers read the index through this module with pyarrow alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stages import ranges, sharedfs
from stages.errors import SchemaError, ShardError
from stages.layout import RunLayout, parse_part

INDEX_VERSION = 1
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLine:
    """One accepted rollout's end, and where its row lies; range fields are None when it never reached a shard."""

    type: Literal["rows"] = "rows"
    seq: int
    rollout_id: str
    group_id: str
    task_id: str
    tag: str
    status: str
    failure_class: str | None
    reward: float | None
    mask_sample: bool
    min_policy_version: int | None
    shard: str | None
    offset: int | None
    length: int | None
    crc32: int | None
    chains: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """One group's end: how it closed and whose rows count."""

    type: Literal["group"] = "group"
    seq: int
    group_id: str
    tag: str
    closed_by: Literal["complete", "min_usable", "deadline", "cancelled"]
    usable: int
    rollout_ids: list[str]


IndexLine = RowsLine | GroupLine

_KINDS: dict[Any, tuple[type[RowsLine] | type[GroupLine], frozenset[str]]] = {
    "rows": (RowsLine, frozenset(f.name for f in dataclasses.fields(RowsLine))),
    "group": (GroupLine, frozenset(f.name for f in dataclasses.fields(GroupLine))),
}


def line_from(raw: Mapping[str, Any], where: str) -> IndexLine:
    """The record of a decoded line; fields that this version does not know are left out.

    Raises:
        ShardError: of no known type, or with a field missing.
    """
    try:
        kind, names = _KINDS[raw["type"]]
        return kind(**{name: value for name, value in raw.items() if name in names})
    except (KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"{where}: not an index line: {str(raw)[:120]} ({error!r})") from error


def parse_line(text: bytes, where: str) -> IndexLine:
    """The record of a line's text; raises ShardError where it is not JSON or not an index line."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ShardError(f"{where}: not an index line: {text[:120]!r} ({error})") from error
    return line_from(raw, where)


@dataclass(slots=True)
class _Part:
    """One file: how far it is read, and its complete lines that nobody has asked for yet."""

    path: Path
    after_seq: int | None = None
    offset: int = 0
    line_number: int = 0
    next_seq: int = 0
    lines: deque[bytes] = field(default_factory=deque)

    def read_more(self) -> None:
        """Take in complete lines. What follows the last newline, or a hole of zeros, is not there yet."""
        try:
            data = sharedfs.read_range(self.path, self.offset, _READ_BYTES)
        except OSError as error:
            if error.errno not in ranges.STALE:
                raise
            return
        data = data.partition(b"\0")[0]
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) == _READ_BYTES:
                raise ShardError(f"{self.path}: a line from byte {self.offset} is longer than {_READ_BYTES} bytes")
            return
        self.offset += end
        self.lines.extend(data[: end - 1].split(b"\n"))
        if self.after_seq is None:
            self._read_header(self.lines.popleft())

    def take(self, wanted: int) -> IndexLine | None:
        """The line of seq `wanted`, skipping those before it; None while it is not there."""
        while self.next_seq <= wanted:
            if not self.lines:
                self.read_more()
                if not self.lines:
                    return None
            self.line_number += 1
            self.next_seq += 1
            text = self.lines.popleft()
            if self.next_seq <= wanted:
                continue
            where = f"{self.path} line {self.line_number}"
            line = parse_line(text, where)
            if line.seq != wanted:
                raise ShardError(
                    f"{where}: seq {line.seq} where {wanted} must be: the index is damaged", found=line.seq
                )
            return line
        return None

    def _read_header(self, text: bytes) -> None:
        self.line_number = 1
        where = f"{self.path} line 1"
        try:
            raw = json.loads(text)
            version, after_seq = int(raw["v"]), int(raw["after_seq"])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{where}: not an index header: {text[:120]!r}") from error
        if version > INDEX_VERSION:
            raise SchemaError(
                f"{where}: index version {version}, known is {INDEX_VERSION}: read it with a newer rollmill"
            )
        self.after_seq, self.next_seq = after_seq, after_seq + 1


class IndexFollower:
    """Gives the index line by line and goes on where it stopped; the directory is listed at the start.

    Later parts are found by name: the next part of the highest epoch, and part 0 of each epoch up to the one that
    router.json names. It is listed again only where a part is known to be hidden by a stale cache.
    """

    def __init__(self, run_dir: Path, after: int = 0) -> None:
        self.layout = RunLayout(run_dir)
        self.seq = after
        self._parts: dict[tuple[int, int], _Part] = {}
        self._floor = (0, 0)
        self._list()

    def poll(self, limit: int = 10_000) -> list[IndexLine]:
        """The lines after `seq` that are there now, at most `limit`; empty when nothing came.

        Raises:
            ShardError: a complete line is malformed or out of order; names file and line.
            SchemaError: a header is of a newer version.
        """
        self._discover()
        lines: list[IndexLine] = []
        while len(lines) < limit:
            owner = self._owner(self.seq + 1)
            line = owner.take(self.seq + 1) if owner else None
            if line is None:
                if self._is_hidden(self.seq + 1) and self._list():
                    self._discover()
                    continue
                break
            lines.append(line)
            self.seq = line.seq
        return lines

    def _is_hidden(self, seq: int) -> bool:
        """Whether a known part begins beyond `seq`: then the line exists, and its part is not visible here yet."""
        return any(part.after_seq is not None and part.after_seq >= seq for part in self._parts.values())

    def _list(self) -> bool:
        """Find parts by listing the directory; whether any was new."""
        try:
            names = sharedfs.list_dir(self.layout.index)
        except OSError as error:
            if error.errno not in ranges.STALE:
                raise
            return False  # parts are found by their names later
        keys = {key for name in names if (key := parse_part(name, ".jsonl")) is not None and key >= self._floor}
        new = keys - self._parts.keys()
        self._parts.update((key, _Part(self.layout.index_part(*key))) for key in new)
        return bool(new)

    def _discover(self) -> None:
        """Find new parts by name and read the headers that are not known yet."""
        known = -1
        while known != len(self._parts):
            known = len(self._parts)
            epoch, part = max(self._parts, default=(0, -1))
            self._probe(epoch, part + 1)
            for newer in range(epoch + 1, max(self._router_epoch(), epoch + 1) + 1):
                self._probe(newer, 0)
        for unread in self._parts.values():
            if unread.after_seq is None:
                unread.read_more()

    def _probe(self, epoch: int, part: int) -> None:
        while epoch > 0 and self._is_there(epoch, part):
            self._parts.setdefault((epoch, part), _Part(self.layout.index_part(epoch, part)))
            part += 1

    def _is_there(self, epoch: int, part: int) -> bool:
        try:
            return sharedfs.exists(self.layout.index_part(epoch, part))
        except OSError as error:
            if error.errno not in ranges.STALE:
                raise
            return False

    def _router_epoch(self) -> int:
        try:
            return int(json.loads(sharedfs.read_bytes(self.layout.router_json))["epoch"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0  # absent or half-visible: the next epoch is found by its own name meanwhile

    def _owner(self, seq: int) -> _Part | None:
        """The part that line `seq` must come from; parts below it are done with, as owners only rise."""
        keys = [key for key, part in self._parts.items() if part.after_seq is not None and part.after_seq < seq]
        if not keys:
            return None
        owner = max(keys)
        if owner > self._floor:
            self._floor = owner
            self._parts = {key: part for key, part in self._parts.items() if key >= owner}
        return self._parts[owner]


def read_index(run_dir: Path, after: int = 0) -> list[IndexLine]:
    """All lines after a seq that are there now."""
    follower, lines = IndexFollower(run_dir, after), list[IndexLine]()
    while batch := follower.poll():
        lines += batch
    return lines
