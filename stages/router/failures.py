"""failures.jsonl: a line a rollout that did not complete, derived from the journal, written anew by each router."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stages import sharedfs
from stages.layout import RunLayout
from stages.ledger.effects import Failed


class _Line(msgspec.Struct, frozen=True):
    seq: int


_decoder = msgspec.json.Decoder(_Line)


def known_up_to(layout: RunLayout, seq: int) -> list[bytes]:
    """The file's good lines of seqs up to `seq`, in order, each once. Blocking."""
    try:
        lines = sharedfs.read_bytes(layout.failures).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found, last = [], 0
    for line in lines:
        try:
            number = _decoder.decode(line).seq
        except msgspec.MsgspecError:
            break
        if last < number <= seq:
            found.append(line)
            last = number
    return found


class FailuresFile:
    """Written under a temporary name first, so that an older router's descriptor leads to a file without a name."""

    def __init__(self, layout: RunLayout, kept: Sequence[bytes]) -> None:
        self._path = layout.failures
        self._waiting = [*kept]
        self._file: sharedfs.AppendFile | None = None

    def take(self, failed: Sequence[Failed]) -> None:
        """Queue the lines of rollouts that have ended."""
        self._waiting += [msgspec.json.encode(effect.line) for effect in failed]

    def write(self) -> None:
        """Make what waits visible and durable. Blocking.

        Raises:
            OSError: the filesystem refuses; the lines are kept, and the next call goes on in a new file.
        """
        if self._file is not None and self._file.broken:
            self._start_anew(self._file)
        if self._file is not None and not self._waiting:
            return
        file = self._file or sharedfs.AppendFile(sharedfs.temp_beside(self._path))
        try:
            file.append(b"".join(line + b"\n" for line in self._waiting))
            file.sync()
            if self._file is None:
                sharedfs.publish(file.path, self._path)
        except OSError:
            if self._file is None:
                file.close()
                sharedfs.unlink(file.path)
            raise
        self._file, self._waiting = file, []

    def _start_anew(self, broken: sharedfs.AppendFile) -> None:
        good = sharedfs.read_range(self._path, 0, broken.good_length)
        self._waiting = [*good.split(b"\n")[:-1], *self._waiting]
        broken.close()
        self._file = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
