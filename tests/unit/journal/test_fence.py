"""Fences: what a filesystem is taken for, what is tried on it, and who ends himself where a look proves nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from stages import sharedfs
from stages.errors import FencedError, JournalError
from stages.journal import fence
from stages.journal.fence import Fence
from stages.journal.history import claim, read_events
from stages.journal.payloads import Payloads
from stages.journal.writer import JournalWriter
from stages.layout import RunLayout
from stages.ledger.events import Tick
from stages.syscalls import FileSystem
from tests.support.routers import make_run

MOUNTS = """\
/dev/vda / ext4 rw 0 0
home:/export /home nfs4 rw,vers=4.2 0 0
mds@tcp:/lus /scratch lustre rw,flock 0 0
/dev/vdb /home/local xfs rw 0 0
fs:/a /with\\040space nfs rw 0 0
first /twice ext4 rw 0 0
second /twice nfs rw 0 0
fs:/d /données nfs4 rw 0 0
"""


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/work", "ext4"), ("/home/me/run", "nfs4"), ("/home/local/run", "xfs"), ("/scratch", "lustre"),
        ("/homes/x", "ext4"), ("/with space/x", "nfs"), ("/twice/x", "nfs"),
        ("/données/run", "nfs4"),
    ],
)  # fmt: skip
def test_a_path_lies_on_the_deepest_and_latest_mount(path: str, kind: str) -> None:
    assert fence.filesystem_of(Path(path), MOUNTS) == kind


def test_a_local_disk_is_fenced_by_stat_and_nothing_is_left_of_the_probe(layout: RunLayout) -> None:
    before = sharedfs.list_dir(layout.journal)
    assert fence.probe(layout).kind == fence.STAT
    assert sharedfs.list_dir(layout.journal) == before


def test_nfs_is_fenced_by_time_too(layout: RunLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"{MOUNTS}server:/x {layout.root.resolve()} nfs4 rw 0 0\n")
    monkeypatch.setattr(fence, "_MOUNTS", mounts)
    assert fence.probe(layout) == fence.Probed("nfs4", fence.TIME)


class CopyingLinks(FileSystem):
    """Makes a file of its own for each link, as some network filesystems do."""

    def link(self, src: str, dst: str) -> None:
        with open(src, "rb") as source, open(dst, "xb") as copy:
            copy.write(source.read())


class NoLinks(FileSystem):
    def link(self, src: str, dst: str) -> None:
        raise PermissionError(1, "Operation not permitted", dst)


class LyingLinks(FileSystem):
    """Every link succeeds, also the second of one name."""

    def link(self, src: str, dst: str) -> None:
        if os.path.exists(dst):
            os.unlink(dst)
        os.link(src, dst)


@pytest.mark.parametrize("fs", [CopyingLinks(), NoLinks(), LyingLinks()])
def test_a_filesystem_without_true_hard_links_is_refused(layout: RunLayout, fs: FileSystem) -> None:
    with sharedfs.use(fs), pytest.raises(JournalError, match="links"):
        fence.probe(layout)
    assert not [name for name in sharedfs.list_dir(layout.journal) if "fence" in name]


def test_who_could_not_beat_for_too_long_fences_itself_by_time(layout: RunLayout) -> None:
    held = Fence(layout, 1, hold_s=5.0)
    held.check()
    held.beaten(Fence.now() - 6.0)
    with pytest.raises(FencedError, match="no beat"):
        held.check()
    held.beaten()
    held.check()
    Fence(layout, 1).beaten(0.0)
    Fence(layout, 1).check()


class BlindStat(FileSystem):
    """The look at the fence fails a few times after the lines are durable."""

    def __init__(self, times: int) -> None:
        self.left = times

    def stat(self, path: str) -> os.stat_result:
        if path.endswith(".claim") and self.left:
            self.left -= 1
            raise OSError(116, "Stale file handle", path)
        return super().stat(path)


async def test_lines_that_are_durable_are_not_written_again_while_the_fence_cannot_be_seen(layout: RunLayout) -> None:
    claim(layout, 1, "test")
    payloads = Payloads(layout)
    payloads.begin(1)
    writer = JournalWriter(layout, 1, payloads, lambda effects: None)
    running = asyncio.create_task(writer.run())
    fs = BlindStat(2)
    with sharedfs.use(fs):
        await asyncio.wait_for(writer.put(Tick(t=1.0), None, []), 10)
        writer.close()
        await running
    assert fs.left == 0
    assert layout.journal_part(1, 0).read_bytes().count(b"tick") == 1
    assert list(read_events(layout)) == []  # no epoch's first record: nothing was decided
