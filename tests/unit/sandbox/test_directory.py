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
