"""The one door to the shared filesystem: atomic files, links as proof, append-only files that break for good."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from stages import sharedfs
from stages.sharedfs import AppendFile, BrokenFileError
from tests.support.faults import FaultyFs

CALLS_OF_AN_ATOMIC_WRITE = [("open", 0), ("open", 1), ("write", 0), ("fsync", 0), ("fsync", 1), ("rename", 0)]


def test_files_and_directories_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        sharedfs.make_dirs(tmp_path / "a" / "b")
        sharedfs.write_atomic(tmp_path / "a" / "b" / "x", b"x")
        AppendFile(tmp_path / "a" / "y").close()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/x", "a/y")]
    assert modes == [0o700, 0o700, 0o600, 0o600]


@pytest.mark.parametrize(("op", "skip"), CALLS_OF_AN_ATOMIC_WRITE)
def test_a_failed_atomic_write_leaves_the_old_file_and_no_temp(tmp_path: Path, op: str, skip: int) -> None:
    path = tmp_path / "router.json"
    sharedfs.write_atomic(path, b"old")
    fs = FaultyFs()
    fs.fail(op, errno.EIO, skip=skip)
    with sharedfs.use(fs), pytest.raises(OSError, match="Input/output") as raised:
        sharedfs.write_atomic(path, b"new")
    assert raised.value.errno == errno.EIO
    assert path.read_bytes() == b"old"
    left = [name for name in os.listdir(tmp_path) if name != path.name]
    # A directory that cannot be synced leaves the finished temp: it is whole, and nothing names it.
    assert left == [] or (op, skip) in {("open", 1), ("fsync", 1)}


def test_a_short_atomic_write_is_refused(tmp_path: Path) -> None:
    fs = FaultyFs()
    fs.shorten()
    with sharedfs.use(fs), pytest.raises(BrokenFileError, match="3 of 6 bytes"):
        sharedfs.write_atomic(tmp_path / "x", b"abcdef")
    assert os.listdir(tmp_path) == []


def test_atomic_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), sharedfs.atomic_file(path) as file:
        file.append(b"half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with sharedfs.atomic_file(path) as file:
        file.append(b"a")
        assert not path.exists()
        file.append(b"b")
    assert path.read_bytes() == b"ab"
    assert os.listdir(tmp_path) == ["out"]


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    assert sharedfs.read_bytes(path) == b"0123456789"
    assert sharedfs.read_range(path, 8, 100) == b"89"
    assert sharedfs.read_range(path, 20, 1) == b""
    assert sharedfs.stat_size(path) == 10
    assert sharedfs.exists(path)
    assert not sharedfs.exists(path / "below")
    mapped = sharedfs.map_file(path)
    assert mapped is not None
    assert mapped[2:4] == b"23"
    path.write_bytes(b"")
    assert sharedfs.map_file(path) is None
    sharedfs.unlink(path)
    sharedfs.unlink(path)
    with pytest.raises(FileNotFoundError):
        sharedfs.read_bytes(path)


def test_exactly_one_of_two_links_wins(tmp_path: Path) -> None:
    sources = [tmp_path / "a", tmp_path / "b"]
    for source in sources:
        sharedfs.create_exclusive(source, source.name.encode())
    assert [sharedfs.link(source, tmp_path / "claim") for source in sources] == [True, False]
    assert (tmp_path / "claim").read_bytes() == b"a"


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOENT, errno.EIO])
def test_the_link_count_is_believed_and_not_the_return_code(tmp_path: Path, code: int) -> None:
    sharedfs.create_exclusive(tmp_path / "a", b"")
    fs = FaultyFs()
    fs.fail("link", code)  # the link is made, and then the answer is lost
    with sharedfs.use(fs):
        assert sharedfs.link(tmp_path / "a", tmp_path / "claim")


def test_a_link_that_was_not_made_for_another_reason_raises(tmp_path: Path) -> None:
    sharedfs.create_exclusive(tmp_path / "a", b"")
    with pytest.raises(FileNotFoundError):
        sharedfs.link(tmp_path / "a", tmp_path / "missing" / "claim")


def test_append_file_offsets_lengths_and_durability(tmp_path: Path) -> None:
    with AppendFile(tmp_path / "x") as file:
        assert [file.append(b"abc"), file.append(memoryview(b"defg"))] == [0, 3]
        assert (file.length, file.good_length) == (7, 0)
        assert file.sync() == 7 == file.good_length
    file.close()
    with pytest.raises(BrokenFileError, match="closed"):
        file.append(b"x")
    with pytest.raises(FileExistsError):
        AppendFile(tmp_path / "x")


@pytest.mark.parametrize("fault", ["short", "enospc", "fsync"])
def test_a_broken_file_takes_nothing_more(tmp_path: Path, fault: str) -> None:
    fs = FaultyFs()
    with sharedfs.use(fs), AppendFile(tmp_path / "x") as file:
        file.append(b"good")
        file.sync()
        if fault == "short":
            fs.shorten()
        else:
            fs.fail("write" if fault == "enospc" else "fsync", errno.ENOSPC if fault == "enospc" else errno.EIO)
        with pytest.raises(BrokenFileError, match="4 bytes are durable") as raised:
            file.append(b"bad!")
            file.sync()
        assert raised.value.errno == (errno.EIO if fault == "fsync" else errno.ENOSPC)
        assert raised.value.filename == str(tmp_path / "x")
        with pytest.raises(BrokenFileError, match="new file") as again:
            file.append(b"more")
        assert again.value.good_length == 4
        with pytest.raises(BrokenFileError, match="new file"):
            file.sync()
        assert file.broken
    assert b"more" not in (tmp_path / "x").read_bytes()


def test_a_directory_that_cannot_be_made_is_one_error() -> None:
    with pytest.raises(FileNotFoundError) as refused:
        sharedfs.make_dirs(Path("/proc/rollmill-none/a/b"))
    assert refused.value.filename == "/proc/rollmill-none"
