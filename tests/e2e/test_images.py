"""A run in an imported image, by the real command, under each backend; and images that are not there."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.images import cached_root

IN_IMAGE = "task._target_=tests.support.image_task.InImage"


def images(*words: str) -> subprocess.CompletedProcess[str]:
    """`rollmill images ...`."""
    command = [sys.executable, "-P", "-m", "launch", "images", *words]
    return subprocess.run(command, cwd=runs.REPOSITORY, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' image as `docker save` would give it, with a second layer and variables."""
    home = tmp_path_factory.mktemp("docker")
    with tarfile.open(home / "lower.tar", "w") as lower:
        lower.add(cached_root(), arcname=".")
    with tarfile.open(home / "upper.tar", "w") as upper:
        mark = tarfile.TarInfo("image-mark")
        mark.size = len(b"of the image\n")
        upper.addfile(mark, io.BytesIO(b"of the image\n"))
    (home / "config.json").write_text(json.dumps({"config": {"Env": ["PATH=/usr/bin:/bin", "MARK=of its config"]}}))
    manifest = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": ["lower.tar", "upper.tar"]}]
    (home / "manifest.json").write_text(json.dumps(manifest))
    with tarfile.open(home / "image.tar", "w") as saved:
        for name in ("config.json", "lower.tar", "upper.tar", "manifest.json"):
            saved.add(home / name, arcname=name)
    (home / "lower.tar").unlink()
    return home / "image.tar"


def test_a_run_takes_place_in_the_image_that_its_task_names(tmp_path: Path, archive: Path) -> None:
    imported = images("import", "team/debian:1", str(archive), "--store", str(tmp_path / "store"))
    assert imported.returncode == 0, imported.stderr
    digest = imported.stdout.split()[1]
    assert images("verify", f"store={tmp_path / 'store'}").stdout == f"team/debian:1 {digest} ok\n"
    keys = tmp_path / "store/layers/keys"
    for backend, image in (("bubblewrap", "team/debian:1"), ("apptainer", digest)):
        run_dir = tmp_path / backend
        result = runs.run(
            run_dir, IN_IMAGE, f"+task.options.image={image!r}", "agent=oracle", "task.limit=4", "group_size=2",
            f"sandbox={backend}",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert [row["reward"] for row in runs.rows(run_dir)] == [1.0] * 8
        assert (run_dir.parent / "store") == keys.parents[1]
    assert len(list(keys.iterdir())) == len({path.read_bytes() for path in keys.iterdir()})


def test_an_image_that_is_not_there_stops_the_run_in_one_line(tmp_path: Path) -> None:
    result = runs.run(tmp_path / "run", IN_IMAGE, "+task.options.image=nope", "agent=oracle", "task.limit=2")
    assert result.returncode != 0
    assert "no image 'nope' in" in result.stderr and "rollmill images import" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_hostile_archive_is_refused_in_one_line(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as bad:
        bad.addfile(tarfile.TarInfo("../../escaped"), io.BytesIO(b""))
    refused = images("import", "bad", str(tmp_path / "bad.tar"), "--store", str(tmp_path / "store"))
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("rollmill: ") and "a path outside the image" in refused.stderr
    assert images("list", "--store", str(tmp_path / "store")).stdout == ""
