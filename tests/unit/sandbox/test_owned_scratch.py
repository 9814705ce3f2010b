"""Scratch directories with an owner: the living keep theirs, those of the dead are swept."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

from sandbox.scratch import owned, sweep


def own_and_die(base: Path, tell: Connection) -> None:
    with owned(base, "run-1-x-") as path:
        (path / "inside" / "deeper").mkdir(parents=True)
        tell.send(str(path))
        tell.close()
        os._exit(9)


def test_a_directory_of_the_living_stays_and_one_of_the_dead_goes(tmp_path: Path) -> None:
    mine, its = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=own_and_die, args=(tmp_path, its))
    process.start()
    dead = Path(mine.recv())
    process.join(30)
    assert dead.exists()
    with owned(tmp_path, "run-2-y-") as living:
        (tmp_path / "layers").mkdir()
        assert sweep(tmp_path) == 1
        assert living.exists() and not dead.exists() and (tmp_path / "layers").exists()
    assert not living.exists()
    assert sweep(tmp_path) == 0
