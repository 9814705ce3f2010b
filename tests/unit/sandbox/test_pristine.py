"""What changed in a directory is told exactly, whatever its sizes and times say."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.flatten import changed, flatten
from sandbox.pristine import Pristine
from sandbox.scratch import remove_tree
from tests.unit.sandbox.test_flatten import plain
from tests.unit.sandbox.trees import TREES, Tree, make, read


@settings(max_examples=40, deadline=None)
@given(base=TREES.map(plain), layer=TREES, moved=st.data())
def test_image_and_changes_are_what_the_agent_left(base: Tree, layer: Tree, moved: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        make(place / "image", base)
        (place / "root").mkdir()
        flatten([place / "image"], place / "root")
        pristine = Pristine(place / "root")
        changed(place / "root", pristine, place / "nothing")
        assert read(place / "nothing") == {}
        make(place / "layer", layer)
        flatten([place / "layer"], place / "root")
        root = os.fsencode(place / "root")
        if names := sorted(os.listdir(root)):
            os.rename(root + b"/" + moved.draw(st.sampled_from(names)), root + b"/moved")
        changed(place / "root", pristine, place / "stage")
        (place / "again").mkdir()
        flatten([place / "image", place / "stage"], place / "again")
        assert read(place / "again") == read(place / "root")
        for entry in place.iterdir():
            remove_tree(entry)


def test_what_keeps_its_size_and_times_and_what_swapped_names_is_seen(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "file").write_text(name[:3])
    pristine = Pristine(tmp_path / "root")
    one, two = tmp_path / "root/one", tmp_path / "root/two"
    edited = tmp_path / "root/three/file"
    before = edited.stat()
    edited.write_text("THR")
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    one.rename(tmp_path / "other")
    two.rename(one)
    (tmp_path / "other").rename(two)
    changed(tmp_path / "root", pristine, tmp_path / "stage")
    assert {path: (tmp_path / "stage" / path / "file").read_text() for path in os.listdir(tmp_path / "stage")} == {
        "one": "two", "two": "one", "three": "THR",
    }  # fmt: skip
