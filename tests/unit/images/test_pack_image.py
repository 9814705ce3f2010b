"""Images from every kind of source: the same root file system has one digest, layers are applied in order."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sandbox.errors import ImageError
from sandbox.images.pack import PackedImage, pack_image
from sandbox.layers import unpack
from tests.unit.images.archives import BASH, Given, docker, oci, oci_layout, tar

PLAIN: list[Given] = [
    *BASH,
    ("etc", "dir", None),
    ("etc/passwd", "file", b"root:x:0:0::/root:/bin/bash\n"),
    ("usr", "dir:555", None),
    ("usr/tool", "file:4755", b"tool"),
    ("usr/again", "hard", "usr/tool"),
    ("sbin", "link", "usr"),
    ("out", "link", "/etc/passwd"),
    ("dev", "dir", None),
    ("dev/null", "device", None),
    ("pipe", "fifo", None),
    ("secret", "file:0", b"x"),
]


LARGE: list[Given] = [*BASH, ("large", "file", random.Random(5).randbytes(100_000))]


def broken(data: bytes) -> bytes:
    """With other bytes in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(one ^ 0xFF for one in data[middle : middle + 50]) + data[middle + 50 :]


def configured(config: dict[str, Any]) -> bytes:
    """A Docker archive that configures this."""
    manifest = json.dumps([{"Config": "c", "Layers": []}]).encode()
    return tar([("manifest.json", "file", manifest), ("c", "file", json.dumps({"config": config}).encode())])


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def packed(tmp_path: Path, source: Path) -> PackedImage:
    return pack_image(source, tmp_path / "image.tar.zst", tmp_path / "scratch")


def unpacked(tmp_path: Path, source: Path) -> Path:
    image = packed(tmp_path, source)
    target = tmp_path / "unpacked"
    with Path(image.layer.path).open("rb") as file:
        unpack(file, target, digest=image.layer.digest)
    return target


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")} - {"proc", "sys", "dev", "run", "tmp"}


def test_one_content_has_one_digest_however_it_comes(tmp_path: Path) -> None:
    data = tar(PLAIN)
    sources = [
        write(tmp_path / "a.tar", data),
        write(tmp_path / "a.gz", gzip.compress(data)),
        write(tmp_path / "a.bz2", bz2.compress(data)),
        write(tmp_path / "a.xz", lzma.compress(data)),
        write(tmp_path / "a.zst", zstandard.ZstdCompressor().compress(data)),
        write(tmp_path / "docker.tar", docker([PLAIN])),
        write(tmp_path / "docker.tgz", gzip.compress(docker([PLAIN]))),
        write(tmp_path / "oci.tar", oci([PLAIN])),
        oci_layout(tmp_path / "layout", [PLAIN]),
    ]
    images = {source.name: packed(tmp_path, source) for source in sources}
    assert len({image.layer.digest for image in images.values()}) == 1
    root = unpacked(tmp_path, sources[0])
    assert packed(tmp_path, root).layer.digest == images["a.tar"].layer.digest
    assert images["a.tar"].dropped == 2
    for name in ("docker.tar", "docker.tgz", "oci.tar", "layout"):
        assert images[name].configured.env == {"PATH": "/opt/bin:/usr/bin", "A": "b=c"}
        assert images[name].configured.workdir == "/testbed"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_a_sandbox_cannot_use_is_flattened(tmp_path: Path) -> None:
    root = unpacked(tmp_path, write(tmp_path / "a.tar", tar(PLAIN)))
    assert stat.S_IMODE((root / "usr/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "usr").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "secret").stat().st_mode) == 0o400
    assert (root / "usr/tool").stat().st_ino == (root / "usr/again").stat().st_ino
    assert (root / "usr/tool").stat().st_uid == os.getuid()
    assert os.readlink(root / "out") == "/etc/passwd"
    assert not (root / "dev/null").exists() and not (root / "pipe").exists()
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    assert all((root / name).is_dir() for name in ("proc", "sys", "dev", "run"))


LOWER: list[Given] = [
    *BASH,
    ("a", "dir", None), ("a/gone", "file", b"1"), ("a/kept", "file", b"2"),
    ("b", "dir", None), ("b/old", "file", b"3"), ("b/deep", "dir", None), ("b/deep/old", "file", b"4"),
    ("c", "dir", None), ("c/x", "file", b"5"),
    ("usr", "dir", None), ("lib", "link", "usr"),
    ("e", "file", b"6"),
]  # fmt: skip
UPPER: list[Given] = [
    ("a/.wh.gone", "file", b""),
    ("b", "dir", None), ("b/deep", "dir", None), ("b/deep/new", "file", b"7"), ("b/.wh..wh..opq", "file", b""),
    (".wh.c", "file", b""),
    ("lib/through", "file", b"8"),
    ("e", "dir", None), ("e/f", "file", b"9"),
    ("a/.wh..wh.plnk", "dir", None),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["docker", "oci"])
def test_layers_are_applied_in_order_with_their_deletions(tmp_path: Path, kind: str) -> None:
    archive = docker([LOWER, UPPER]) if kind == "docker" else oci([LOWER, UPPER])
    root = unpacked(tmp_path, write(tmp_path / "image.tar", archive))
    assert names(root) == {
        "bin", "bin/bash", "a", "a/kept", "b", "b/deep", "b/deep/new", "usr", "usr/through", "lib", "e", "e/f",
    }  # fmt: skip


def test_a_deletion_outside_a_layered_image_is_only_left_out(tmp_path: Path) -> None:
    members = [*BASH, ("keep", "file", b"1"), (".wh.keep", "file", b"")]
    assert "keep" in names(unpacked(tmp_path, write(tmp_path / "a.tar", tar(members))))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("../x", "file", b"")], "outside the image"),
        ([("/x", "file", b"")], "outside the image"),
        ([("a/../../x", "dir", None)], "outside the image"),
        ([("x", "hard", "/etc/shadow")], "outside the image"),
        ([("x", "hard", "../../etc/shadow")], "outside the image"),
        ([("x", "hard", "nothing")], "cannot be written: No such file"),
        ([("x", "hard", "bin")], "no file"),
        ([("disk", "device", None)], "/disk is a device"),
        ([("a/" * 300, "dir", None)], "deeper than 256"),
        ([("way", "link", "/nowhere"), ("way/x", "file", b"")], "/way/x cannot be written"),
        ([("n" * 300, "file", b"")], "File name too long"),
    ],
)
@pytest.mark.parametrize("kind", ["tar", "docker"])
def test_a_hostile_archive_is_refused_in_one_line(tmp_path: Path, members: list[Given], words: str, kind: str) -> None:
    given = [*BASH, *members]
    source = write(tmp_path / "image.tar", tar(given) if kind == "tar" else docker([given]))
    with pytest.raises(ImageError) as caught:
        packed(tmp_path, source)
    assert words in str(caught.value) and "\n" not in str(caught.value) and str(source) in str(caught.value)
    assert list((tmp_path / "scratch").iterdir()) == [] and not (tmp_path / "image.tar.zst").exists()


def test_a_link_in_the_archive_does_not_lead_the_next_name_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("host")
    inside = str(outside).lstrip("/")
    members: list[Given] = [
        *BASH,
        (inside, "dir", None), ("way", "link", str(outside)), ("way/planted", "file", b"x"),
        ("up", "link", "../../../../.."),
        ("up/planted", "file", b"y"), ("file", "link", str(outside / "file")), ("file", "file", b"z"),
        ("taken", "link", str(outside / "file")), ("stolen", "hard", "taken"),
    ]  # fmt: skip
    root = unpacked(tmp_path, write(tmp_path / "a.tar", tar(members)))
    assert [path.name for path in outside.iterdir()] == ["file"] and (outside / "file").read_text() == "host"
    assert (root / "planted").read_bytes() == b"y" and (root / "file").read_bytes() == b"z"
    assert (root / inside / "planted").read_bytes() == b"x"
    assert (root / "stolen").is_symlink()


def test_a_whiteout_does_not_lead_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("host")
    lower: list[Given] = [*BASH, ("way", "link", str(outside))]
    upper: list[Given] = [("way/.wh.file", "file", b""), ("way/.wh..wh..opq", "file", b""), (".wh...", "file", b"")]
    unpacked(tmp_path, write(tmp_path / "a.tar", docker([lower, upper])))
    assert (outside / "file").read_text() == "host"


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.images.pack.MAX_BYTES", 10_000)
    with pytest.raises(ImageError, match="unpacks to more than 10000 bytes"):
        packed(tmp_path, write(tmp_path / "a.gz", gzip.compress(tar([*BASH, ("big", "file", bytes(20_000))]))))
    monkeypatch.setattr("sandbox.images.pack.MAX_ENTRIES", 3)
    with pytest.raises(ImageError, match="more than 3 names"):
        packed(tmp_path, write(tmp_path / "b.tar", tar([*BASH, *((f"f{n}", "file", b"") for n in range(3))])))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read as a tar archive"),
        (b"no archive at all" * 100, "cannot be read as a tar archive"),
        (gzip.compress(tar(BASH))[:-20], "image"),
        (lzma.compress(tar(BASH))[:-30], "image"),
        (tar(BASH)[:700], "image"),
        (tar([("etc", "dir", None)]), "has no /bin/bash"),
        (oci([PLAIN], damaged=True), "is damaged"),
        (oci([PLAIN], machine="s390x"), "holds 0 images for"),
        (tar([("manifest.json", "file", b"[]")]), "holds 0 images"),
        (tar([("manifest.json", "file", b"{")]), "no complete image"),
        (tar([("manifest.json", "file", b'[{"Config":"x","Layers":[]}]')]), "no complete image"),
        (tar([("oci-layout", "file", b"{}"), ("index.json", "file", b"{}")]), "no complete image"),
        (tar([("manifest.json", "file", b"[" * 200_000)]), "no complete image: RecursionError"),
        (tar([("manifest.json", "link", "manifest.json")]), "no complete image: RecursionError"),
        (tar([("oci-layout", "file", b"{}"), ("index.json", "file", b"[" * 200_000)]), "no complete image"),
        (configured({"Env": ["A=\0"]}), "must be texts without NUL"),
        (configured({"WorkingDir": 5}), "must be texts without NUL"),
        (tar(LARGE)[:50_000], "image cannot be imported: unexpected end of data"),
        (broken(gzip.compress(tar(LARGE))), "image is damaged: "),
        (broken(bz2.compress(tar(LARGE))), "cannot be read as a tar archive: "),
        (broken(lzma.compress(tar(LARGE))), "image is damaged: "),
        (broken(zstandard.ZstdCompressor(write_checksum=True).compress(tar(LARGE))), "image is damaged: "),
        (tar([*BASH, ("a\nb\x1b[31m", "device", None)]), "/a\\nb\\x1b[31m is a device"),
        (tar([*BASH, ("a\n../../b", "file", b"")]), "a path outside the image"),
    ],
)
def test_a_damaged_source_is_refused_in_one_line(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ImageError) as caught:
        packed(tmp_path, write(tmp_path / "image", data))
    assert words in str(caught.value) and str(caught.value).isprintable()


def test_a_directory_with_what_no_image_holds(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/bash").write_text("x")
    os.mkfifo(root / "pipe")
    (root / "link").symlink_to("/nowhere")
    (root / "new\nline").write_bytes(b"1")
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"2")
    image = packed(tmp_path, root)
    assert image.dropped == 1
    found = names(unpacked(tmp_path, root))
    assert {"link", "new\nline", os.fsdecode(b"\xff\xfe")} <= found and "pipe" not in found
