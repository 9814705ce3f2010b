"""ShardReader: committed rollouts in seq order, closed groups, and single rollouts by id; needs pyarrow alone.

A reader owns nothing in the run directory and any number of them may read at once. It reads what the index names and
nothing else; a range that is not visible yet is waited for, gently, until `visibility_s` is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from stages import ranges
from stages.errors import ShardError
from stages.layout import RunLayout
from stages.shards.index import GroupLine, IndexFollower, IndexLine, RowsLine, line_from
from stages.shards.mapped import MappedBatches
from stages.shards.rows import ShardGroup, ShardRow, row_to_json
from stages.shards.sealed import SealedBatches

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0


class ShardReader:
    """Reads a run's committed rollouts.

    Args:
        run_dir: the run directory.
        after: give only what has a higher seq.
        follow: go on for ever, until `stop`, instead of ending with what is committed now.
        tag: give only rollouts and groups of this tag.
        rank, world_size: give only whole groups, each to one of `world_size` readers: the n-th group of the index (of
            this tag) goes to rank n modulo `world_size`, in every reader and after every restart alike.
        visibility_s: how long a committed range may stay invisible here before that is an error.
    """

    def __init__(
        self,
        run_dir: str | Path,
        after: int = 0,
        follow: bool = False,
        tag: str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        visibility_s: float = 60.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of world_size {world_size}: give 0 <= rank < world_size")
        self.run_dir = Path(run_dir)
        self.seq = after
        self.follow = follow
        self.tag = tag
        self.rank, self.world_size = rank, world_size
        self.visibility_s = visibility_s
        self._layout = RunLayout(self.run_dir)
        self._batches = MappedBatches(self._layout)
        self._sealed = SealedBatches(self._layout)
        self._stopped = threading.Event()
        self._lookup: IndexFollower | None = None
        self._lines: dict[str, RowsLine] = {}
        self._ordinals: dict[str, int] = {}

    def __iter__(self) -> Iterator[ShardRow]:
        """Rollouts after `seq` in order. `seq` rises with what was given out: make a new reader with it to resume.

        Raises:
            ShardError: a committed range did not become readable in time, or the index is damaged.
            SchemaError: a file is of a newer schema than this reader knows.
        """
        # Whose turn a group is depends on all groups before it, so ranks read the index from its start.
        after, start = self.seq, 0 if self.world_size > 1 else self.seq
        for line in self._follow_lines(start):
            wanted = self._wanted(line)
            if line.seq <= after:
                continue
            if isinstance(line, RowsLine) and wanted:
                row = self.read(line)
                self.seq = line.seq
                yield row
            else:
                self.seq = line.seq

    def groups(self) -> Iterator[ShardGroup]:
        """Groups that closed after `seq`, each with its rollouts that are published, in the order of closing.

        The index is read from its start, because a group that closes late has rollouts that ended before `seq`.
        Raises what iteration raises.
        """
        after = self.seq
        waiting: dict[str, dict[str, RowsLine]] = {}
        for line in self._follow_lines(0):
            if isinstance(line, RowsLine):
                self._wanted(line)  # counts its group
                waiting.setdefault(line.group_id, {})[line.rollout_id] = line
                continue
            lines = waiting.pop(line.group_id, {})
            if self._wanted(line) and line.seq > after:
                rows = tuple(self.read(lines[name]) for name in line.rollout_ids if name in lines)
                self.seq = line.seq
                yield ShardGroup(line, rows)

    def get(self, rollout_id: str) -> ShardRow | None:
        """The committed rollout of this id, or None when the index has none; raises what iteration raises."""
        if rollout_id not in self._lines:
            self._lookup = self._lookup or IndexFollower(self.run_dir)
            while lines := self._lookup.poll():
                self._lines.update((line.rollout_id, line) for line in lines if isinstance(line, RowsLine))
        line = self._lines.get(rollout_id)
        return None if line is None else self.read(line)

    def read(self, line: RowsLine) -> ShardRow:
        """The rollout that an index line names, waited for up to `visibility_s`; raises what iteration raises."""
        if line.shard is None or line.offset is None or line.length is None or line.crc32 is None:
            return ShardRow(line, None)
        if self._sealed.hold(line.shard, line.seq):
            return ShardRow(line, *self._sealed.read(line.seq, line.rollout_id))
        deadline, pause = time.monotonic() + self.visibility_s, ranges.FIRST_PAUSE_S
        while True:
            try:
                place = self._batches.read(line.shard, line.offset, line.length, line.crc32, line.rollout_id)
                return ShardRow(line, *place)
            except ranges.NotYetError as error:
                self._sealed.refresh()
                if self._sealed.hold(line.shard, line.seq):  # compacted since this reader began
                    return ShardRow(line, *self._sealed.read(line.seq, line.rollout_id))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ranges.gave_up(error, self.visibility_s) from error
            if self._stopped.wait(min(pause, left)):
                raise ShardError(f"{line.shard}: reader stopped while waiting for bytes {line.offset}+{line.length}")
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def stop(self) -> None:
        """End a following iteration, from any thread, at its next line or pause."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and let go of the mapped files; rows that were given out stay readable."""
        self.stop()
        self._batches.close()
        self._sealed.close()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _wanted(self, line: RowsLine | GroupLine) -> bool:
        if self.tag is not None and line.tag != self.tag:
            return False
        if self.world_size == 1:
            return True
        return self._ordinals.setdefault(line.group_id, len(self._ordinals)) % self.world_size == self.rank

    def _follow_lines(self, after: int) -> Iterator[IndexLine]:
        """Index lines in order; with `follow` it waits 0.2 s, rising to 2 s, while nothing comes."""
        follower, pause = IndexFollower(self.run_dir, after), _FIRST_PAUSE_S
        while not self._stopped.is_set():
            lines = follower.poll()
            for line in lines:
                if self._stopped.is_set():
                    return
                yield line
            if lines:
                pause = _FIRST_PAUSE_S
            elif not self.follow:
                return
            else:
                self._stopped.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)


def read_row_json(run_dir: Path, line: Mapping[str, Any], *, visibility_s: float = 5.0) -> dict[str, Any]:
    """The row of one decoded `rows` index line as JSON values; blocks, so the router calls it in a thread.

    Raises:
        ShardError: `line` is no rows line, names no range, or its range is not readable within `visibility_s`.
    """
    known = line_from(line, f"{run_dir / 'index'} seq {line.get('seq')}")
    if not isinstance(known, RowsLine) or known.shard is None:
        raise ShardError(f"{run_dir / 'index'} seq {line.get('seq')}: this line names no row in a shard")
    with ShardReader(run_dir, visibility_s=visibility_s) as reader:
        return row_to_json(reader.read(known))
