"""A plain directory as a sandbox's ground: what counts as a change since its start."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.directory import DirectoryGround
from sandbox.protocols import SandboxSpec


def test_a_change_that_hides_its_time_and_size_is_one(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "workspace").mkdir(parents=True)
    (layer / "tmp").mkdir()
    (layer / "workspace/kept").write_text("one\n")
    os.utime(layer / "workspace/kept", (1, 1))
    ground = DirectoryGround(SandboxSpec(workspace=("/workspace",), layers=(str(layer),)), tmp_path / "s1")
    ground.prepare()
    assert list(ground.trees()[b""].iterdir()) == []
    kept = tmp_path / "s1/root/workspace/kept"
    with kept.open("r+") as file:
        file.write("two\n")
    os.utime(kept, (1, 1))
    assert (ground.trees()[b""] / "workspace/kept").read_text() == "two\n"


def test_what_was_not_touched_is_told_without_a_pack_and_much_is_not_looked_at(tmp_path: Path) -> None:
    for name in ("workspace", "tmp"):  # as the layer of an environment has them
        (tmp_path / "prepared" / name).mkdir(parents=True)
    spec = SandboxSpec(image="host", layers=(str(tmp_path / "prepared"),), workspace=("/workspace",))
    ground = DirectoryGround(spec, tmp_path / "s1")
    ground.prepare()
    assert ground.untouched()
    (tmp_path / "s1/root/workspace/new").touch()
    assert not ground.untouched()
    layer = tmp_path / "layer"
    (layer / "tmp").mkdir(parents=True)
    for number in range(70):
        (layer / str(number)).touch()
    large = DirectoryGround(SandboxSpec(image="host", layers=(str(layer),), workspace=("/tmp",)), tmp_path / "s2")
    large.prepare()
    assert not large.untouched() and list(large.trees()[b""].iterdir()) == []
