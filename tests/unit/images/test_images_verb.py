"""`rollmill images`: list and prune for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.errors import CommandError
from launch.verbs.images import run
from sandbox.nodecache import NodeCache
from tests.unit.images.archives import BASH, tar


def test_an_image_comes_is_listed_and_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tar").write_bytes(tar(BASH))
    store = ["--store", str(tmp_path / "store")]
    assert run("images", ["import", "a:1", str(tmp_path / "a.tar"), *store]) == 0
    capsys.readouterr()
    assert run("images", ["list", "--json", *store]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["name"] == "a:1" and listed["entries"] > 2
    assert run("images", ["prune", "a:1", "--dry-run", *store]) == 0
    said = capsys.readouterr().out
    assert "name a:1" in said and f"image {listed['digest']}" in said and "2 would leave the store" in said
    assert run("images", ["prune", "a:1", "--json", *store]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["removed"]] == ["a:1", listed["digest"]]
    assert document["size_bytes"] == listed["size_bytes"] and not document["dry_run"]
    assert run("images", ["list", *store]) == 0 and capsys.readouterr().out == ""
    with pytest.raises(CommandError, match="no image 'a:1'"):
        run("images", ["prune", "a:1", *store])


def test_what_a_node_keeps_unpacked_is_pruned_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 77)
    cache = NodeCache(tmp_path / "rollmill-77/layers")
    cache.hold("a", lambda directory: (directory / "in").mkdir(parents=True)).release()
    words = ["prune", "--node", "0", "--scratch", str(tmp_path), "--store", str(tmp_path / "store"), "--json"]
    assert run("images", [*words, "--dry-run"]) == 0 and cache.names() == ["a"]
    assert json.loads(capsys.readouterr().out)["node"]["names"] == ["a"]
    assert run("images", words) == 0 and cache.names() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "one"], "build takes NAME and DEFINITION"),
        (["build", "one", "/nope.def"], "/nope.def cannot be read as a definition file"),
        (["build", "host", "/nope.def"], "'host' is no image name"),
        (["prune", "nope"], "no image 'nope'"),
        (["prune", "--quota", "nan"], "'nan' is no number from 0"),
        (["prune", "--node", "inf"], "'inf' is no number from 0"),
        (["prune", "--older-than=-1"], "'-1' is no number from 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(CommandError) as caught:
        run("images", [*words, "--store", str(tmp_path / "store")])
    assert said in str(caught.value) and "\n" not in str(caught.value)
