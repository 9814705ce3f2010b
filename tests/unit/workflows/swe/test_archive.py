"""Archives: unpacked inside their directory alone, and nothing of the future in them."""

from __future__ import annotations

import io
import lzma
import random
import tarfile
from pathlib import Path

import pytest

from tests.support.swe_instance import FILES, write_archive
from workflows.errors import TaskDataError
from workflows.tasks.swe import archive


def names(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir()}


def test_what_shows_the_future_is_left_out(tmp_path: Path) -> None:
    future = {
        ".git/packed-refs": "", ".git/logs/HEAD": "", "vendored/.git/objects/ab/cd": "", "sub/.git": "gitdir: ../x",
        "dist/tally-2.0-py3-none-any.whl": "", "build/lib/tally/__init__.py": "",
        "wheels/tally-2.0-py3-none-any.whl": "",
        "src/tally/__pycache__/__init__.cpython-311.pyc": "", "src/old.pyc": "", ".pytest_cache/v/cache/lastfailed": "",
        ".tox/py311/lib/site-packages/tally/__init__.py": "",
        "src/tally.egg-info/PKG-INFO": "Name: tally\nVersion: 2.0\n",
        ".cache/pip/x": "", "venv/lib/x.py": "",
    }  # fmt: skip
    kept = {"src/other.egg-info/PKG-INFO": "Name: other\nVersion: 1.0\n", "tests/data/x-1-py3-none-any.whl": ""}
    kept |= {"src/build/__init__.py": "", "dist/__init__.py": "", ".gitignore": "*.pyc\n"}
    packed = {**FILES, **future, **kept}
    del packed["dist/tally-2.0-py3-none-any.whl"]  # a package of that name stays
    archive.unpack(write_archive(tmp_path / "a.tar.gz", packed), tmp_path / "tree", version="1.0")
    assert names(tmp_path / "tree") == {*FILES, *kept}


def test_a_dist_directory_of_a_packaging_tool_goes(tmp_path: Path) -> None:
    files = {**FILES, "dist/tally-2.0.tar.gz": ""}
    archive.unpack(write_archive(tmp_path / "a.tar.gz", files), tmp_path / "tree")
    assert names(tmp_path / "tree") == set(FILES)


def test_one_directory_around_everything_is_taken_off(tmp_path: Path) -> None:
    files = {f"tally-0123abc/{name}": text for name, text in FILES.items()}
    archive.unpack(write_archive(tmp_path / "a.tar.gz", files), tmp_path / "tree")
    assert names(tmp_path / "tree") == set(FILES)


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    if name.startswith("/"):  # a leading slash is taken off, as tar does
        archive.unpack(tmp_path / "a.tar", tmp_path / "tree")
        assert names(tmp_path / "tree") == {"out"}
        return
    with pytest.raises(TaskDataError, match="cannot be unpacked"):
        archive.unpack(tmp_path / "a.tar", tmp_path / "tree")
    assert not (tmp_path / "out").exists() and not (tmp_path / "tree").exists()


@pytest.mark.parametrize(
    ("kind", "target"), [(tarfile.SYMTYPE, "../../etc"), (tarfile.LNKTYPE, "../x"), (tarfile.CHRTYPE, "")]
)
def test_links_that_lead_out_and_devices_are_refused(kind: bytes, target: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, target
        tar.addfile(info)
    with pytest.raises(TaskDataError, match="cannot be unpacked"):
        archive.unpack(tmp_path / "a.tar", tmp_path / "tree")


def test_a_file_is_not_written_through_a_link_that_leads_out(tmp_path: Path) -> None:
    """Neither one link alone nor two that lead out together."""
    for links in ({"a": "b", "b": ".."}, {"d/x": "..", "y": "d/x/.."}):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name, target in links.items():
                info = tarfile.TarInfo(name)
                info.type, info.linkname = tarfile.SYMTYPE, target
                tar.addfile(info)
            tar.addfile(tarfile.TarInfo("a/out" if "a" in links else "y/out"), io.BytesIO())
        with pytest.raises(TaskDataError, match="leads out"):
            archive.unpack(tmp_path / "a.tar", tmp_path / "tree")
        assert not (tmp_path / "out").exists()


def test_links_inside_and_modes_are_kept(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        run = tarfile.TarInfo("bin/run")
        run.mode, run.size = 0o755, 2
        tar.addfile(run, io.BytesIO(b"ok"))
        for name, kind, target in (("link", tarfile.SYMTYPE, "bin/run"), ("hard", tarfile.LNKTYPE, "bin/run")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    archive.unpack(tmp_path / "a.tar", tmp_path / "tree")
    assert (tmp_path / "tree/link").readlink() == Path("bin/run") and (tmp_path / "tree/hard").read_bytes() == b"ok"
    assert (tmp_path / "tree/bin/run").stat().st_mode & 0o777 == 0o755


def test_a_truncated_or_missing_archive_is_said(tmp_path: Path) -> None:
    whole = write_archive(tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(whole[: len(whole) // 2])
    for name in ("a.tar.gz", "none.tar.gz"):
        with pytest.raises(TaskDataError, match=name):
            archive.unpack(tmp_path / name, tmp_path / "tree")


def test_equal_trees_make_equal_tars(tmp_path: Path) -> None:
    made = []
    for number in (1, 2):
        tree = tmp_path / f"tree{number}"
        archive.unpack(write_archive(tmp_path / "a.tar.gz"), tree)
        made.append(archive.pack(tree, "/testbed", {"/opt/x": (b"y", 0o755)}, {"/opt/l": "x"}))
    assert made[0] == made[1]
    with tarfile.open(fileobj=io.BytesIO(made[0])) as tar:
        assert {"testbed", "testbed/src/tally/__init__.py", "opt/x", "opt/l"} <= set(tar.getnames())
        assert {(member.uid, member.gid, member.mtime) for member in tar} == {(0, 0, archive.TIME)}


def test_links_to_themselves_endless_paths_and_damaged_blocks_are_said(tmp_path: Path) -> None:
    looped, deep, damaged = tmp_path / "loop.tar", tmp_path / "deep.tar", tmp_path / "x.tar.xz"
    with tarfile.open(looped, "w") as tar:
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.SYMTYPE, "a"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("a/b"), io.BytesIO())
    with tarfile.open(deep, "w") as tar:
        tar.addfile(tarfile.TarInfo("/".join(["d"] * 1500)), io.BytesIO())
    data = bytearray(lzma.compress(looped.read_bytes() + random.Random(1).randbytes(100_000)))
    data[50_000] ^= 255
    damaged.write_bytes(data)
    for path in (looped, deep, damaged):
        with pytest.raises(TaskDataError, match=path.name):
            archive.unpack(path, tmp_path / "tree")


def test_a_package_with_the_name_of_a_tools_directory_stays(tmp_path: Path) -> None:
    files = {**FILES, "src/venv/__init__.py": "", "src/venv/x.py": ""}
    archive.unpack(write_archive(tmp_path / "a.tar.gz", {**files, "env/venv/x.py": ""}), tmp_path / "tree")
    assert names(tmp_path / "tree") == set(files)
