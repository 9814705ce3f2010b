"""Publishes index lines: append, fsync, and after any failure a new part that writes anew what was not durable.

Synchronous and used by one publisher: the router calls it in a thread and answers only after it returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stages import sharedfs
from stages.errors import ShardError
from stages.layout import RunLayout
from stages.shards.index import INDEX_VERSION, IndexLine

ROTATE_BYTES = 64 << 20

_encoder = msgspec.json.Encoder()


class IndexWriter:
    """One epoch's index. Its first part exists, header durable, once `open` or `publish` has returned.

    `placed` tells what became durable where, as (part, offset of the first line, lines): the caller takes it away.
    """

    def __init__(self, layout: RunLayout, epoch: int, after_seq: int, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._layout = layout
        self._epoch = epoch
        self._rotate_bytes = rotate_bytes
        self._file: sharedfs.AppendFile | None = None
        self._part = 0
        self._waiting: list[bytes] = []
        self._last_seq = after_seq
        self.durable_seq = after_seq
        self.placed: list[tuple[tuple[int, int], int, list[bytes]]] = []

    def open(self) -> None:
        """Begin the first part, so that its header cuts lower epochs before any line is published.

        Raises:
            OSError: the filesystem refuses; may be called again.
        """
        self._ready()

    def publish(self, lines: Sequence[IndexLine]) -> int:
        """Make the lines visible and durable and return the durable seq.

        Raises:
            ShardError: the seqs do not rise by 1 from the last line given; nothing of `lines` is taken.
            OSError: the filesystem refuses; the lines are kept and go first when `publish` is called again, with none
                or with later ones.
        """
        for expected, line in enumerate(lines, self._last_seq + 1):
            if line.seq != expected:
                raise ShardError(f"index epoch {self._epoch}: line with seq {line.seq} where {expected} must be")
        self._waiting += (_encoder.encode(line) + b"\n" for line in lines)
        self._last_seq += len(lines)
        return self._flush()

    def close(self) -> None:
        """Close the part; closing twice is no error."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> int:
        try:
            return self._write_waiting()
        except sharedfs.BrokenFileError:
            # Once more at once, in a new part: one bad file must not need a second call. A second failure is raised.
            return self._write_waiting()

    def _write_waiting(self) -> int:
        if not self._waiting:
            return self.durable_seq
        file = self._ready()
        try:
            offset = file.append(b"".join(self._waiting))
            file.sync()
        except OSError:
            self.close()
            raise
        self.durable_seq += len(self._waiting)
        self.placed.append(((self._epoch, self._part - 1), offset, self._waiting))
        self._waiting = []
        return self.durable_seq

    def _ready(self) -> sharedfs.AppendFile:
        if self._file is not None and self._file.length >= self._rotate_bytes:
            self.close()
        if self._file is None:
            self._file = self._begin()
        return self._file

    def _begin(self) -> sharedfs.AppendFile:
        header = {"v": INDEX_VERSION, "epoch": self._epoch, "after_seq": self.durable_seq}
        while True:
            path = self._layout.index_part(self._epoch, self._part)
            try:
                file = sharedfs.AppendFile(path)
                break
            except FileExistsError:
                self._part += 1
        try:
            file.append(_encoder.encode(header) + b"\n")
            file.sync()
        except OSError:
            file.close()
            # A part whose header never became durable is nobody's; its number is used again, so that readers who
            # look for the next number are never stopped by a gap.
            sharedfs.unlink(path)
            raise
        self._part += 1
        return file
