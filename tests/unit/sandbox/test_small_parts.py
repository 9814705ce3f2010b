"""Selection, scratch, the host's skeleton, flattening, and the records."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from sandbox.errors import LayerError
from sandbox.flatten import changes, flatten
from sandbox.hostroot import ETC, WRITTEN, build_skeleton, host_digest
from sandbox.protocols import CommandResult, PackedLayer, SandboxSpec
from sandbox.scratch import make_private, remove_few, remove_tree
from sandbox.selection import Selection
from sandbox.tarstream import Entry, encode
from tests.unit.sandbox.trees import make, read


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ("work", "way"), ("work/repo", "take"), ("work/repo/a/b", "take"), ("work/other", "leave"), ("workx", "leave"),
        ("work/repo/__pycache__", "leave"), ("work/repo/x/__pycache__/y", "take"), ("work/repo/a.pyc", "leave"),
        ("work/repo/.git/config", "leave"), ("work/repo/sub/.git/config", "take"), ("tmp", "leave"),
    ],
)  # fmt: skip
def test_selection(path: str, verdict: str) -> None:
    selection = Selection(["/work/repo"], ["__pycache__", "*.pyc", "/work/repo/.git/*"])
    assert selection.verdict(tuple(path.encode().split(b"/"))) == verdict


@pytest.mark.parametrize("path", ["relative", "/a/../b", ""])
def test_wrong_selections_are_refused(path: str) -> None:
    with pytest.raises(LayerError, match="not an absolute path"):
        Selection([path])


def test_a_tree_is_removed_whatever_its_modes_and_depth(tmp_path: Path) -> None:
    tree = make_private(tmp_path, "x-")
    assert stat.S_IMODE(tree.stat().st_mode) == 0o700
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (tree / "link").symlink_to(outside)
    deep = os.open(tree, os.O_RDONLY)
    for _ in range(3000):  # far beyond the longest path and Python's recursion limit
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    (tree / "closed/below").mkdir(parents=True)
    (tree / "closed/below/f").touch()
    (tree / "closed/below").chmod(0)
    (tree / "closed").chmod(0)
    assert remove_tree(tree) and not tree.exists()
    assert (outside / "kept").read_text() == "kept"
    assert remove_tree(tree)


def test_a_small_directory_is_removed_and_a_larger_one_left_whole(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    for name, files in (("small", 5), ("large", 6)):
        (tmp_path / name / "deep/er").mkdir(parents=True)
        (tmp_path / name / "link").symlink_to(tmp_path / "outside")
        for number in range(files):
            (tmp_path / name / f"deep/er/{number}").touch()
        remove_few(str(tmp_path / name), 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "outside"]
    assert len(list((tmp_path / "large/deep/er").iterdir())) == 6 and (tmp_path / "outside/kept").exists()
    remove_few(str(tmp_path / "none"), 8)


def test_the_skeleton_holds_no_secret_of_the_host(tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "etc/ssl/certs").mkdir(parents=True)
    (host / "etc/ssl/private").mkdir()
    (host / "etc/ssl/private/key").write_text("secret")
    (host / "etc/ssl/private").chmod(0o710)
    (host / "etc/ssl/certs/ca.pem").write_text("public")
    (host / "etc/ssl/certs/link.pem").symlink_to("ca.pem")
    (host / "etc/shadow").write_text("secret")
    (host / "etc/passwd").write_text("alice:x:1000:1000::/home/alice:/bin/bash\n")
    (host / "etc/profile").write_text("public")
    (host / "etc/inputrc").write_text("secret")
    (host / "etc/inputrc").chmod(0o600)
    (host / "home/alice").mkdir(parents=True)
    (host / "bin").symlink_to("usr/bin")
    os.mkfifo(host / "etc/services")
    build_skeleton(tmp_path / "skeleton", host)
    found = {str(path.relative_to(tmp_path / "skeleton")) for path in (tmp_path / "skeleton").rglob("*")}
    assert {"etc/ssl/certs/ca.pem", "etc/ssl/certs/link.pem", "etc/profile", "bin", "work", "usr"} <= found
    assert not {"etc/shadow", "etc/ssl/private", "etc/inputrc", "etc/services", "home/alice"} & found
    assert "alice" not in (tmp_path / "skeleton/etc/passwd").read_text()
    assert stat.S_IMODE((tmp_path / "skeleton/tmp").stat().st_mode) == 0o1777


def test_the_allow_list_and_what_is_written_do_not_meet() -> None:
    assert not set(ETC) & set(WRITTEN)
    assert not {"shadow", "gshadow", "sudoers", "ssh", "krb5.keytab", "slurm", "munge"} & set(ETC)


def test_a_system_without_merged_usr_is_refused(tmp_path: Path) -> None:
    (tmp_path / "host/bin").mkdir(parents=True)
    with pytest.raises(ValueError, match="merged-usr"):
        build_skeleton(tmp_path / "skeleton", tmp_path / "host")


def test_the_hosts_digest_changes_with_its_programs(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/tool").write_text("one")
    first = host_digest(tmp_path)
    assert first == host_digest(tmp_path) and len(first) == 64
    (tmp_path / "usr/bin/tool").write_text("other")
    assert host_digest(tmp_path) != first


def test_flattening_carries_deletions_out_and_changes_carry_them_back(tmp_path: Path) -> None:
    file = ("file", 0o644, b"x")
    low = {b"keep": file, b"gone": file, b"d": ("dir", 0o755, False, {b"below": file}), b"swap": file}
    high = {
        b"gone": ("gone",),
        b"d": ("dir", 0o700, True, {b"new": file}),
        b"swap": ("dir", 0o755, False, {b"in": file}),
    }
    make(tmp_path / "low", low)
    make(tmp_path / "high", high)
    (tmp_path / "flat").mkdir()
    flatten([tmp_path / "low", tmp_path / "high"], tmp_path / "flat")
    flat = read(tmp_path / "flat")
    assert flat == {
        b"keep": file, b"d": ("dir", 0o700, False, {b"new": file}), b"swap": ("dir", 0o755, False, {b"in": file}),
    }  # fmt: skip
    (tmp_path / "flat/keep").unlink()
    os.mkfifo(tmp_path / "flat/pipe")
    changes([tmp_path / "low", tmp_path / "high"], tmp_path / "flat", tmp_path / "stage")
    staged = read(tmp_path / "stage")
    assert staged[b"keep"] == ("gone",) and staged[b"gone"] == ("gone",) and b"pipe" not in staged
    assert staged[b"d"] == ("dir", 0o700, False, {b"new": file, b"below": ("gone",)})


def test_records_cross_processes() -> None:
    for record in (CommandResult(1, "é", "/", 0.5), PackedLayer("sha256:x", 1, "/p"), SandboxSpec(env={"A": "b"})):
        assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
        with pytest.raises(AttributeError):
            setattr(record, next(iter(record.__struct_fields__)), None)


def test_headers_are_whole_blocks_with_a_true_checksum() -> None:
    for entry in (
        Entry(b"x", "file", 0o644, 8**11),
        Entry(b"y" * 101, "directory"),
        Entry(b"l", "symlink", 0o777, 0, b"t" * 101),
    ):
        assert len(encode(entry)) == 512 * 3
