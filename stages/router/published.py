"""The published lines as the router knows them: where each lies, the newest in memory, the others read on demand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from stages import sharedfs
from stages.errors import ShardError
from stages.layout import RunLayout, parse_part
from stages.router.places import EndedIds, Places

RECENT: Final = 16_384
"""Lines kept in memory: pollers that keep up never touch the filesystem."""
_BLOCK: Final = 4 << 20
_READ_MAX: Final = 1 << 20
_LINE: Final = 64 << 10


class _Row(msgspec.Struct, frozen=True, tag_field="type", tag="rows"):
    seq: int
    rollout_id: str


class _Group(msgspec.Struct, frozen=True, tag_field="type", tag="group"):
    seq: int
    group_id: str


class _Head(msgspec.Struct, frozen=True):
    after_seq: int


class _File(NamedTuple):
    key: tuple[int, int]
    after_seq: int
    start: int


_lines: msgspec.json.Decoder[_Row | _Group] = msgspec.json.Decoder(_Row | _Group)
_head = msgspec.json.Decoder(_Head)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except msgspec.MsgspecError as error:
        raise ShardError(f"{path}: not an index of this version: {error}") from error


class Published:
    """Append-only: `load` once, then `add` after each publication. `len` is the highest seq that is out."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._places = Places()
        self._recent: deque[bytes] = deque(maxlen=RECENT)
        self.ids = EndedIds()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, key: tuple[int, int], offsets: list[int], texts: Sequence[bytes]) -> None:
        """Lines that have just been published into an index part."""
        self._places.add(key, offsets)
        self._recent.extend(texts)
        for line in texts:
            self._note(_lines.decode(line))

    def _note(self, line: _Row | _Group) -> None:
        if isinstance(line, _Row):
            self.ids.add_row(line.rollout_id, line.seq)
        else:
            self.ids.add_group(line.group_id, line.seq)

    def load(self) -> None:
        """Find every line that is out, by the rule of stages.shards.index: each from its owner alone. Blocking."""
        files = self._files()
        for position, file in enumerate(files):
            cut = min((later.after_seq for later in files[position + 1 :]), default=None)
            if cut is not None and file.after_seq >= cut:
                continue
            if file.after_seq > len(self):
                return  # lines are missing before this file: nothing after them is out
            self._load_file(file, cut)

    def _files(self) -> list[_File]:
        files = []
        for name in sharedfs.list_dir(self._layout.index):
            key = parse_part(name, ".jsonl")
            if key is None:
                continue
            first, newline, _ = sharedfs.read_range(self._layout.index_part(*key), 0, _LINE).partition(b"\n")
            if newline:  # a part without a whole header has no lines
                with _naming(self._layout.index_part(*key)):
                    files.append(_File(key, _head.decode(first).after_seq, len(first) + 1))
        return sorted(files)

    def _load_file(self, file: _File, cut: int | None) -> None:
        for start, data in self._blocks(file):
            with _naming(self._layout.index_part(*file.key)):
                decoded = _lines.decode_lines(data)
            ends = list(itertools.accumulate(map(len, data.splitlines(keepends=True)), initial=start))
            skip = max(0, len(self) + 1 - decoded[0].seq)
            stop = len(decoded) if cut is None else min(len(decoded), cut + 1 - decoded[0].seq)
            if stop > skip and decoded[skip].seq != len(self) + 1:
                return
            self._places.add(file.key, ends[skip:stop])
            for line in decoded[skip:stop]:
                self._note(line)
            if stop < len(decoded):
                return

    def _blocks(self, file: _File) -> Iterator[tuple[int, bytes]]:
        """Whole lines, with the offset of the first."""
        offset, size = file.start, _BLOCK
        while True:
            data = sharedfs.read_range(self._layout.index_part(*file.key), offset, size)
            end = data.partition(b"\0")[0].rfind(b"\n") + 1
            if end == 0:
                if len(data) < size:
                    return
                size *= 4
                continue
            yield offset, data[:end]
            offset += end

    async def texts(self, after: int, limit: int) -> list[bytes]:
        """Lines from `after` + 1 on, at most `limit` and about 1 MiB; empty where nothing more is out."""
        first_recent = len(self) - len(self._recent)
        if after >= first_recent:
            return list(itertools.islice(self._recent, after - first_recent, after - first_recent + limit))
        return await asyncio.to_thread(self._read, after + 1, min(after + limit, first_recent))

    async def line(self, seq: int) -> dict[str, Any]:
        """One published line."""
        result: dict[str, Any] = msgspec.json.decode((await self.texts(seq - 1, 1))[0])
        return result

    def _read(self, first: int, last: int) -> list[bytes]:
        start = self._places.of(first)
        count = 1
        for seq in range(first + 1, last + 1):
            place = self._places.of(seq)
            if place.key != start.key or place.offset - start.offset > _READ_MAX:
                break
            count += 1
        size = self._places.of(first + count - 1).offset - start.offset + _LINE
        while True:
            data = sharedfs.read_range(self._layout.index_part(*start.key), start.offset, size)
            lines = data.split(b"\n", count)
            if len(lines) > count:
                return lines[:count]
            size *= 4
