"""Merging layers: one layer means what the stack meant, exactly, for links, holes and files that nobody may read."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.errors import LayerError
from sandbox.flatten import changes, flatten, squash
from sandbox.layers import pack, unpack
from sandbox.scratch import remove_tree
from tests.unit.sandbox.trees import TREES, Tree, make, read

FILE = ("file", 0o644, b"x")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for entry in tmp_path.iterdir():
        remove_tree(entry)


def plain(tree: Tree) -> Tree:
    """A tree without marks: what could be an image."""
    found: Tree = {}
    for name, node in tree.items():
        if node[0] == "dir":
            found[name] = ("dir", node[1], False, plain(node[3]))
        elif node[0] != "gone":
            found[name] = node
    return found


def over(base: Tree, layer: Tree) -> Tree:
    """What overlayfs shows of a layer on a base; the definition that the code is held against."""
    found = dict(base)
    for name, node in layer.items():
        if node[0] == "gone":
            found.pop(name, None)
        elif node[0] == "dir":
            below = found.get(name)
            merged = below[3] if below is not None and below[0] == "dir" and not node[2] else {}
            found[name] = ("dir", node[1], False, over(merged, node[3]))
        else:
            found[name] = node
    return found


@settings(max_examples=40, deadline=None)
@given(base=TREES.map(plain), layers=st.lists(TREES, min_size=2, max_size=4))
def test_a_squashed_stack_means_what_the_stack_meant(base: Tree, layers: list[Tree]) -> None:
    expected = base
    for layer in layers:
        expected = over(expected, layer)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        stack = [home / f"layer{number}" for number in range(len(layers))]
        for path, layer in zip(stack, layers, strict=True):
            make(path, layer)
        make(home / "stacked", base)
        make(home / "squashed", base)
        flatten(stack, home / "stacked")
        squash(stack, home / "one")
        flatten([home / "one"], home / "squashed")
        assert read(home / "stacked") == expected
        assert read(home / "squashed") == expected
        assert [read(path) for path in stack] == layers  # whatever mode they had for a moment
        for path in (*stack, home / "stacked", home / "squashed", home / "one"):
            remove_tree(path)


@settings(max_examples=25, deadline=None)
@given(low=TREES, high=TREES)
def test_changes_of_a_flat_copy_lead_back_to_it(low: Tree, high: Tree) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        make(home / "low", low)
        make(home / "high", high)
        (home / "flat").mkdir()
        flatten([home / "low", home / "high"], home / "flat")
        changes([home / "low"], home / "flat", home / "stage")
        (home / "again").mkdir()
        flatten([home / "low", home / "stage"], home / "again")
        assert read(home / "again") == read(home / "flat")
        for path in ("low", "high", "flat", "stage", "again"):
            remove_tree(home / path)


def test_links_stay_links_and_holes_stay_holes(directory: Path) -> None:
    layer = directory / "layer"
    (layer / "d").mkdir(parents=True)
    (layer / "a").write_text("shared")
    os.link(layer / "a", layer / "d/z")
    with (layer / "sparse").open("wb") as file:
        file.seek(64 * 1024**2)
        file.write(b"end")
    squash([layer], directory / "one")
    assert (directory / "one/a").stat().st_ino == (directory / "one/d/z").stat().st_ino
    assert (directory / "one/sparse").stat().st_blocks < 1000
    packed = pack({b"": directory / "one"}, directory / "layer.tar.zst")
    with Path(packed.path).open("rb") as file:
        unpack(file, directory / "unpacked", digest=packed.digest)
    found = (directory / "unpacked/sparse").stat()
    assert (found.st_size, found.st_blocks < 1000) == (64 * 1024**2 + 3, True)
    assert (directory / "unpacked/sparse").read_bytes()[-3:] == b"end"


def test_a_replaced_file_leaves_its_other_name_alone(directory: Path) -> None:
    make(directory / "low", {b"a": FILE})
    os.link(directory / "low/a", directory / "low/b")
    make(directory / "high", {b"a": ("file", 0o600, b"new")})
    squash([directory / "low", directory / "high"], directory / "one")
    assert read(directory / "one") == {b"a": ("file", 0o600, b"new"), b"b": FILE}


def test_nothing_is_written_through_a_link_of_a_lower_layer(directory: Path) -> None:
    (directory / "outside").mkdir()
    make(directory / "low", {b"d": ("link", os.fsencode(directory / "outside"))})
    make(directory / "high", {b"d": ("dir", 0o755, False, {b"x": FILE})})
    (directory / "flat").mkdir()
    flatten([directory / "low", directory / "high"], directory / "flat")
    assert list((directory / "outside").iterdir()) == []
    assert stat.S_ISDIR((directory / "flat/d").lstat().st_mode)


def test_a_copy_has_a_limit(directory: Path) -> None:
    make(directory / "low", {b"big": ("file", 0o644, b"x" * 10_000)})
    (directory / "flat").mkdir()
    with pytest.raises(LayerError, match="more than 5000 bytes"):
        flatten([directory / "low"], directory / "flat", max_bytes=5000)
