"""The image store: names and digests, many imports at once, one unpack a node."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from sandbox.errors import ImageError, SandboxError
from sandbox.hostroot import host_digest
from sandbox.nodecache import NodeCache
from stages.imagerecords import HOST, UnpackedImage
from stages.images import ImageStore
from stages.layout import StoreLayout
from tests.unit.images.archives import BASH, Given, docker, tar


def store(tmp_path: Path, node: str = "node") -> ImageStore:
    return ImageStore(StoreLayout(tmp_path / "store"), NodeCache(tmp_path / node))


def taken(images: ImageStore, image: str) -> UnpackedImage:
    with ExitStack() as holds:
        return images.take(image, holds)


def source(tmp_path: Path, name: str, *more: Given) -> Path:
    path = tmp_path / f"{name}.tar"
    path.write_bytes(tar([*BASH, *more]))
    return path


def add(tmp_path: Path, name: str, archive: Path) -> str:
    return store(tmp_path).add(name, archive).name.digest


def unpack(tmp_path: Path, image: str) -> tuple[str, int]:
    found = taken(store(tmp_path), image)
    return found.root, Path(found.root, "bin/bash").stat().st_ino


def test_a_name_and_its_digest_mean_the_same_files(tmp_path: Path) -> None:
    images = store(tmp_path)
    done = images.add("swebench/sweb.eval.x86_64:latest", source(tmp_path, "a", ("who", "file", b"a")))
    assert images.digest(done.name.name) == images.digest(done.name.digest) == done.name.digest
    by_name, by_digest = taken(images, done.name.name), taken(images, done.name.digest)
    assert by_name == by_digest and Path(by_name.root, "who").read_text() == "a"
    assert [(record.name, record.digest) for record, _ in images.names()] == [(done.name.name, done.name.digest)]
    assert images.check(done.name.name) == done.name.digest


def test_docker_variables_come_with_the_image_and_belong_to_the_key(tmp_path: Path) -> None:
    images = store(tmp_path)
    plain = images.add("plain", source(tmp_path, "plain")).name.digest
    (tmp_path / "other.tar").write_bytes(docker([[*BASH, ("x", "file", b"1")]]))
    other = images.add("docker", tmp_path / "other.tar")
    assert (
        taken(images, "docker").env == {"PATH": "/opt/bin:/usr/bin", "A": "b=c"} and other.config.workdir == "/testbed"
    )
    assert taken(images, "plain").env == {}
    assert images.digest("plain") == plain and images.digest("docker").startswith(other.name.digest + "+")


def test_the_same_files_with_other_variables_are_another_image(tmp_path: Path) -> None:
    images = store(tmp_path)
    first = images.add("plain", source(tmp_path, "plain"))
    (tmp_path / "docker.tar").write_bytes(docker([[*BASH]]))
    second = images.add("docker", tmp_path / "docker.tar")
    assert first.name.digest == second.name.digest and second.config.workdir == "/testbed"
    assert taken(images, "plain").env == {} == taken(images, first.name.digest).env
    assert taken(images, "docker").env == {"PATH": "/opt/bin:/usr/bin", "A": "b=c"}
    assert images.digest("docker").startswith(images.digest("plain") + "+")
    assert images.lay_out("docker", tmp_path / "out").env["A"] == "b=c"
    assert images.add("docker", tmp_path / "docker.tar").name.digest == first.name.digest
    with pytest.raises(ImageError, match="with other variables"):
        images.add("plain", tmp_path / "docker.tar")


def test_the_host_and_directories_are_images_too(tmp_path: Path) -> None:
    images = store(tmp_path)
    assert images.digest(HOST) == host_digest() and taken(images, HOST).root == HOST
    assert taken(images, str(tmp_path)).root == str(tmp_path)
    assert images.digest(str(tmp_path)) != images.digest("/")


@pytest.mark.parametrize("image", ["nope", "sha256:" + "0" * 64, "/no/such/directory", "../x", "a b", ""])
def test_an_unknown_image_is_refused_in_one_line_that_says_what_there_is(tmp_path: Path, image: str) -> None:
    images = store(tmp_path)
    images.add("debian", source(tmp_path, "a"))
    for ask in (images.digest, lambda one: taken(images, one)):
        with pytest.raises(ImageError) as caught:
            ask(image)
        assert repr(image) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ImageError, match="there is debian: rollmill images import NAME SOURCE"):
        images.digest("nope")


@pytest.mark.parametrize("name", ["", "host", "/abs", "a b", "-x", "sha256:" + "0" * 64, "n" * 200, "a\nb", "../x"])
def test_a_wrong_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match="is no image name"):
        store(tmp_path).add(name, source(tmp_path, "a"))


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"is too long for a name: .* the most is 160"):
        store(tmp_path).add("a" + "/" * 119, source(tmp_path, "a"))
    with pytest.raises(ImageError, match="no image 'a///"):
        store(tmp_path).digest("a" + "/" * 119)
    assert store(tmp_path).add("n" * 120, source(tmp_path, "a")).name.name == "n" * 120


def test_a_store_where_nothing_can_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (Path("/proc/no-store"), tmp_path / "file" / "store"):
        with pytest.raises(ImageError) as caught:
            ImageStore(StoreLayout(root)).add("x", source(tmp_path, "a"))
        assert str(caught.value).startswith(f"the store {root} cannot be written: ") and "\n" not in str(caught.value)
    with pytest.raises(ImageError, match="no scratch directory can be made in /proc/no-scratch: No such file"):
        store(tmp_path).add("x", source(tmp_path, "a"), scratch=Path("/proc/no-scratch"))
    with pytest.raises(ImageError, match="file cannot be read as a store: Not a directory"):
        ImageStore(StoreLayout(tmp_path / "file")).names()


def test_a_name_keeps_its_meaning_until_it_is_replaced(tmp_path: Path) -> None:
    images = store(tmp_path)
    first = images.add("x", source(tmp_path, "a")).name.digest
    assert images.add("x", source(tmp_path, "a")).name.digest == first
    changed = source(tmp_path, "b", ("new", "file", b"1"))
    with pytest.raises(ImageError, match=f"x is {first} already"):
        images.add("x", changed)
    assert images.digest("x") == first
    second = images.add("x", changed, replace=True).name.digest
    assert images.digest("x") == second != first and images.digest(first) == first


def test_imports_at_once_leave_one_whole_image(tmp_path: Path) -> None:
    archives = [source(tmp_path, f"s{number}", ("n", "file", b"%d" % (number % 2))) for number in range(6)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        digests = list(pool.map(add, [tmp_path] * 6, [f"name{number % 2}" for number in range(6)], archives))
    assert len(set(digests)) == 2
    images = store(tmp_path)
    assert {record.name: record.digest for record, _ in images.names()} == {"name0": digests[0], "name1": digests[1]}
    assert [images.check(f"name{number}") for number in range(2)] == digests[:2]
    assert not [path for path in (tmp_path / "store").rglob("*") if path.suffix == ".tmp"]


def test_many_workers_of_a_node_unpack_once(tmp_path: Path) -> None:
    store(tmp_path).add("x", source(tmp_path, "a", *((f"f{n}", "file", os.urandom(3000)) for n in range(300))))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(unpack, [tmp_path] * 16, ["x"] * 16))
    assert len(found) == 1


def test_a_damaged_blob_is_found(tmp_path: Path) -> None:
    images = store(tmp_path)
    digest = images.add("x", source(tmp_path, "a")).name.digest
    blob = StoreLayout(tmp_path / "store").image_blob(digest[7:])
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    for ask in (images.check, lambda one: taken(images, one)):
        with pytest.raises(SandboxError) as caught:
            ask("x")
        assert "\n" not in str(caught.value)
    blob.unlink()
    with pytest.raises(ImageError, match="no image"):
        images.check("x")
