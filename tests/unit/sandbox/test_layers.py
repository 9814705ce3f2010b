"""The layer format: exact, deterministic, refused where hostile."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings

from sandbox.errors import LayerError
from sandbox.layers import pack, pack_nothing, unpack
from sandbox.scratch import remove_tree
from sandbox.tarstream import END, MTIME, Entry, encode, padding
from tests.unit.sandbox.trees import TREES, Tree, make, read


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for entry in tmp_path.iterdir():
        remove_tree(entry)


def tar_of(path: str | Path) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(Path(path).read_bytes()).read()


def layer_file(entries: list[tuple[Entry, bytes]], ending: bytes = END) -> tuple[io.BytesIO, str]:
    """A compressed layer written by hand, and its digest."""
    tar = b"".join(encode(entry) + content + padding(len(content)) for entry, content in entries) + ending
    return io.BytesIO(zstandard.ZstdCompressor().compress(tar)), "sha256:" + hashlib.sha256(tar).hexdigest()


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_any_tree_comes_back_and_has_one_digest(tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        make(home / "upper", tree)
        first = pack({b"": home / "upper"}, home / "one.tar.zst")
        with (home / "one.tar.zst").open("rb") as file:
            unpack(file, home / "layer", digest=first.digest)
        assert read(home / "layer") == read(home / "upper") == tree
        second = pack({b"": home / "layer"}, home / "two.tar.zst")
        assert second.digest == first.digest and second.entries == first.entries
        assert first.digest == "sha256:" + hashlib.sha256(tar_of(first.path)).hexdigest()
        for path in ("upper", "layer"):
            remove_tree(home / path)


def test_the_layer_of_nothing_is_what_packing_an_unchanged_tree_gives(directory: Path) -> None:
    (directory / "upper").mkdir()
    packed, nothing = pack({b"": directory / "upper"}, directory / "one"), pack_nothing(directory / "two")
    assert (nothing.digest, nothing.entries) == (packed.digest, 0)
    assert tar_of(nothing.path) == tar_of(packed.path)
    with pytest.raises(LayerError, match="cannot be written"):
        pack_nothing(directory / "none" / "three")
    assert {entry.name for entry in directory.iterdir()} == {"upper", "one", "two"}


@settings(max_examples=30, deadline=None)
@given(tree=TREES)
def test_the_standard_librarys_tar_reads_the_same(tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        make(home / "upper", tree)
        packed = pack({b"": home / "upper"}, home / "one.tar.zst")
        remove_tree(home / "upper")
        with tarfile.open(fileobj=io.BytesIO(tar_of(packed.path))) as tar:
            members = tar.getmembers()
        assert len(members) == packed.entries
        for member in members:
            assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", MTIME)
            node: tuple[object, ...] = ("dir", 0, False, tree)
            parts = os.fsencode(member.name).split(b"/")
            if parts[-1].startswith(b".wh."):
                continue
            for part in parts:
                node = node[3][part]  # type: ignore[index]
            assert {"dir": member.isdir(), "file": member.isreg(), "link": member.issym()}[str(node[0])]


def test_time_owner_order_and_attributes_do_not_change_the_digest(directory: Path) -> None:
    digests = []
    for number, order in enumerate((range(50), reversed(range(50)))):
        upper = directory / f"u{number}"
        upper.mkdir()
        for index in order:
            (upper / f"file{index}").write_text(str(index))
            os.utime(upper / f"file{index}", (number, number * 1000))
        os.setxattr(upper / "file1", "user.overlay.origin", os.urandom(8))
        os.setxattr(upper / "file1", "user.mine", b"x")
        if os.getuid() == 0:
            os.chown(upper / "file2", 1000 + number, 1000)
        digests.append(pack({b"": upper}, directory / f"{number}.tar.zst").digest)
    assert digests[0] == digests[1]


def test_a_known_tree_keeps_its_digest(directory: Path) -> None:
    """Layers are kept in stores for years: whatever changes this digest breaks them."""
    tree: Tree = {
        b"dir": ("dir", 0o750, True, {b"file": ("file", 0o640, b"content\n"), b"gone": ("gone",)}),
        b"link": ("link", b"../target"), b"n" * 120: ("file", 0o755, b""), b"\xff": ("file", 0o600, b"\0" * 600),
    }  # fmt: skip
    make(directory / "upper", tree)
    packed = pack({b"": directory / "upper"}, directory / "layer.tar.zst")
    assert packed.digest == "sha256:b321cdbfa934c578e0eed2e7847e2a494ad6ad818ef5298ed334cb7bc28de379"


def test_hard_links_stay_links(directory: Path) -> None:
    upper = directory / "upper"
    (upper / "d").mkdir(parents=True)
    (upper / "d/first").write_text("shared")
    os.link(upper / "d/first", upper / "z")
    packed = pack({b"": upper}, directory / "layer.tar.zst")
    with Path(packed.path).open("rb") as file:
        unpack(file, directory / "layer", digest=packed.digest)
    assert (directory / "layer/z").stat().st_ino == (directory / "layer/d/first").stat().st_ino
    assert packed.tar_bytes < 512 * 8


def test_setuid_is_dropped_and_what_no_layer_holds_is_counted(directory: Path) -> None:
    upper = directory / "upper"
    upper.mkdir()
    (upper / "tool").write_text("x")
    (upper / "tool").chmod(0o6755)
    (upper / ".wh.planted").write_text("x")
    os.mkfifo(upper / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(upper / "socket"))
    packed = pack({b"": upper}, directory / "layer.tar.zst")
    assert (packed.entries, packed.skipped) == (1, 3)
    with tarfile.open(fileobj=io.BytesIO(tar_of(packed.path))) as tar:
        assert tar.getmembers()[0].mode == 0o755


def test_a_mounted_tree_is_merged_in_its_place(directory: Path) -> None:
    make(directory / "root", {b"etc": ("dir", 0o755, False, {b"x": ("file", 0o644, b"")}), b"var": ("gone",)})
    make(directory / "usr", {b"bin": ("dir", 0o755, False, {b"tool": ("file", 0o755, b"tool")})})
    packed = pack({b"": directory / "root", b"usr": directory / "usr"}, directory / "layer.tar.zst")
    with tarfile.open(fileobj=io.BytesIO(tar_of(packed.path))) as tar:
        assert tar.getnames() == ["etc", "etc/x", "usr", "usr/bin", "usr/bin/tool", ".wh.var"]


@pytest.mark.parametrize(
    ("tree", "paths", "names"),
    [
        ({b"a": ("dir", 0o755, False, {b"b": ("file", 0o644, b""), b"c": ("gone",)})}, ["/a/b"], ["a", "a/b"]),
        ({b"a": ("gone",)}, ["/a/b/c"], ["a", "a/.wh.b"]),
        ({b"a": ("link", b"/etc")}, ["/a/b"], ["a", "a/.wh.b"]),
        ({b"a": ("dir", 0o755, True, {})}, ["/a/b"], ["a", "a/.wh.b"]),
        (
            {b"a": ("dir", 0o755, True, {b"b": ("dir", 0o700, False, {b"f": ("file", 0o644, b"")})})}, ["/a/b"],
            ["a", "a/b", "a/b/.wh..wh..opq", "a/b/f"],
        ),
        ({b"a": ("dir", 0o755, False, {})}, ["/a/b"], ["a"]),
        ({b"a": ("file", 0o644, b""), b"ab": ("file", 0o644, b"")}, ["/a"], ["a"]),
    ],
)  # fmt: skip
def test_declared_paths_alone(directory: Path, tree: Tree, paths: list[str], names: list[str]) -> None:
    make(directory / "upper", tree)
    packed = pack({b"": directory / "upper"}, directory / "layer.tar.zst", paths=paths)
    with tarfile.open(fileobj=io.BytesIO(tar_of(packed.path))) as tar:
        assert tar.getnames() == names


def test_a_pack_has_a_size_limit_and_leaves_nothing_behind(directory: Path) -> None:
    make(directory / "upper", {b"big": ("file", 0o644, b"x" * 10_000)})
    with pytest.raises(LayerError, match="more than 5000 bytes"):
        pack({b"": directory / "upper"}, directory / "layer.tar.zst", max_bytes=5000)
    assert [path.name for path in directory.iterdir()] == ["upper"]


FILE = (Entry(b"f", "file", 0o644, 1), b"x")
HOSTILE = {
    "absolute": [(Entry(b"/etc/passwd", "file", 0o644, 1), b"x")],
    "climbing": [(Entry(b"../x", "file", 0o644, 1), b"x")],
    "climbing inside": [(Entry(b"d", "directory"), b""), (Entry(b"d/../../x", "file"), b"")],
    "dot": [(Entry(b".", "directory"), b"")],
    "empty": [(Entry(b"", "file"), b"")],
    "through a link": [(Entry(b"d", "symlink", 0o777, 0, b"/tmp"), b""), (Entry(b"d/x", "file"), b"")],
    "over a link": [(Entry(b"d", "symlink", 0o777, 0, b"/tmp/x"), b""), (Entry(b"d", "file"), b"")],
    "link over a directory": [(Entry(b"d", "directory"), b""), (Entry(b"d", "symlink", 0o777, 0, b"/"), b"")],
    "twice": [FILE, FILE],
    "orphan": [(Entry(b"no/parent", "file"), b"")],
    "below a file": [FILE, (Entry(b"f/x", "file"), b"")],
    "hard link out": [(Entry(b"h", "hardlink", 0o644, 0, b"/etc/passwd"), b"")],
    "hard link up": [(Entry(b"h", "hardlink", 0o644, 0, b"../../etc/passwd"), b"")],
    "hard link to a link": [
        (Entry(b"l", "symlink", 0o777, 0, b"/etc/passwd"), b""), (Entry(b"h", "hardlink", 0o644, 0, b"l"), b""),
    ],
    "setuid": [(Entry(b"f", "file", 0o4755, 0), b"")],
    "setgid directory": [(Entry(b"d", "directory", 0o2755), b"")],
    "whiteout of dot": [(Entry(b".wh..", "file"), b"")],
    "whiteout of dots": [(Entry(b".wh...", "file"), b"")],
    "whiteout of nothing": [(Entry(b".wh.", "file"), b"")],
    "whiteout with content": [(Entry(b".wh.x", "file", 0o644, 1), b"x")],
    "whiteout as directory": [(Entry(b".wh.x", "directory"), b"")],
    "unknown mark": [(Entry(b".wh..wh.plnk", "file"), b"")],
    "deep": [(Entry(b"/".join([b"d"] * depth), "directory"), b"") for depth in range(1, 300)],
    "too long": [(Entry(b"x" * 300, "file"), b"")],
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_entries_are_refused(directory: Path, case: str) -> None:
    file, digest = layer_file(HOSTILE[case])
    with pytest.raises(LayerError):
        unpack(file, directory / "layer", digest=digest)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("flag", [b"3", b"4", b"6", b"7", b"L", b"K", b"S", b"g", b"\0", b"D"])
def test_other_types_are_refused(directory: Path, flag: bytes) -> None:
    header = bytearray(encode(Entry(b"x", "file")))
    header[156:157] = flag
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    tar = bytes(header) + END
    with pytest.raises(LayerError, match="type"):
        unpack(io.BytesIO(zstandard.compress(tar)), directory / "layer", digest="sha256:x")
    assert list(directory.iterdir()) == []


def test_bombs_are_refused(directory: Path) -> None:
    bomb, digest = layer_file([(Entry(b"zeros", "file", 0o644, 50_000_000), bytes(50_000_000))])
    assert len(bomb.getvalue()) < 10_000
    with pytest.raises(LayerError, match="more than 1000000 bytes"):
        unpack(bomb, directory / "layer", digest=digest, max_bytes=1_000_000)
    many, digest = layer_file([(Entry(b"%d" % number, "file"), b"") for number in range(100)])
    with pytest.raises(LayerError, match="more than 99 entries"):
        unpack(many, directory / "layer", digest=digest, max_entries=99)
    assert list(directory.iterdir()) == []


def test_a_torn_or_changed_layer_is_refused(directory: Path) -> None:
    file, digest = layer_file([FILE, (Entry(b"g", "file", 0o644, 5000), b"y" * 5000)])
    raw = file.getvalue()
    cases = [raw[: len(raw) // 2], b"", b"no zstd at all", raw[:-4]]
    for broken in cases:
        with pytest.raises(LayerError):
            unpack(io.BytesIO(broken), directory / "layer", digest=digest)
    with pytest.raises(LayerError, match="not sha256:0000"):
        unpack(io.BytesIO(raw), directory / "layer", digest="sha256:0000")
    for ending in (b"", bytes(512), END + b"\0" * 512, END + encode(FILE[0])):
        bad, bad_digest = layer_file([FILE], ending)
        with pytest.raises(LayerError):
            unpack(bad, directory / "layer", digest=bad_digest)
    assert list(directory.iterdir()) == []


def test_a_layer_that_is_there_is_left_alone(directory: Path) -> None:
    file, digest = layer_file([FILE])
    unpack(file, directory / "layer", digest=digest)
    (directory / "layer/mark").touch()
    unpack(io.BytesIO(b"never read"), directory / "layer", digest=digest)
    assert (directory / "layer/mark").exists() and [path.name for path in directory.iterdir()] == ["layer"]


def test_unpacked_marks_are_overlays_own(directory: Path) -> None:
    file, digest = layer_file(
        [(Entry(b".wh.x", "file"), b""), (Entry(b"d", "directory"), b""), (Entry(b"d/.wh..wh..opq", "file"), b"")]
    )
    unpack(file, directory / "layer", digest=digest)
    status = (directory / "layer/x").lstat()
    assert stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
    assert os.getxattr(directory / "layer/d", "user.overlay.opaque") == b"y"
    assert not (directory / "layer/.wh.x").exists()
