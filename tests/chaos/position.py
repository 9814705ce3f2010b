"""How far a run is, read from its journal while it is being written."""

from __future__ import annotations

from pathlib import Path

from stages.journal.codec import scan
from stages.layout import RunLayout, parse_part
from stages.ledger import events
from stages.ledger.events import Committed, Submitted


class Position:
    """Follows the journal's parts; `share` is the part of RUN's and EVAL's commits that has come.

    Lines that a later epoch does not believe count too, which makes a strike come early and nothing else.
    """

    def __init__(self, run_dir: Path, rollouts: int) -> None:
        self._layout, self._rollouts = RunLayout(run_dir), rollouts
        self._offsets: dict[Path, int] = {}
        self._accepted = False
        self._commits = 0

    def share(self) -> float:
        """0 before anything is accepted, then above 0, 1 when every rollout has its row."""
        if self._layout.journal.is_dir():
            for path in self._layout.journal.iterdir():
                if parse_part(path.name) is not None:
                    self._read(path)
        return min(1.0, max(0.01, self._commits / (2 * self._rollouts))) if self._accepted else 0.0

    def _read(self, path: Path) -> None:
        offset = self._offsets.get(path, 0)
        if path.stat().st_size <= offset:
            return
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        end = 0
        for line in scan(data):
            end = line.end
            event = events.decode(line.body)
            self._accepted = self._accepted or isinstance(event, Submitted)
            if isinstance(event, Committed):
                self._commits += sum(item.segment is not None or item.row is not None for item in event.commits)
        self._offsets[path] = offset + end
