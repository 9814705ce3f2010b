"""What killed processes leave behind is swept; what the living use is not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from stages import leftovers, sharedfs
from stages.identity import here
from stages.layout import StoreLayout
from stages.members import Member, names
from tests.unit.stages_files.samples import make_layout


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_only_files_of_dead_processes_of_this_node_go(tmp_path: Path) -> None:
    layout, store, dead = make_layout(tmp_path), StoreLayout(tmp_path / "store"), ended_pid()
    for directory in store.directories:
        sharedfs.make_dirs(directory)
    node = here().node
    gone = [directory / f".x.json.{node}.{dead}.0.0a1b2c3d.tmp" for directory in (layout.root, store.layer_blobs)]
    kept = [
        layout.root / f".x.json.{node}.{os.getpid()}.0.0a1b2c3d.tmp",
        layout.root / f".x.json.other.{dead}.0.0a1b2c3d.tmp",
        layout.root / "mine.tmp",
    ]  # fmt: skip
    for path in gone + kept:
        path.write_bytes(b"")
    for member, at, pid in (("run-1-a", node, dead), ("run-2-b", node, os.getpid()), ("run-3-c", "other", dead)):
        record = Member("run", member, at, pid, None, 0, None, 0.0)
        layout.member(member).write_bytes(msgspec.json.encode(record))
    assert leftovers.sweep(layout, store) == 3
    assert not any(path.exists() for path in gone) and all(path.exists() for path in kept)
    assert names(layout) == {"run-2-b", "run-3-c"}
