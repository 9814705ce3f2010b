"""Images built after definition files: in our own sandbox without a network, and by Apptainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import ImageError
from sandbox.images.build import Builder, Network
from sandbox.images.containers import Configured
from sandbox.images.pack import PackedImage
from sandbox.layers import unpack
from sandbox.protocols import SandboxBackend
from tests.integration.sandbox.grounds import image_directory

TEXT = """Bootstrap: localimage
From: {base}
%files
    note /opt/note
    tree /opt/tree
%environment
    export GREETING="hello there"
%post
    cat /opt/note > /made
    echo "$BELOW" >> /made
    rm -r /etc/passwd
    mkdir /new
%test
    [ "$GREETING" = "hello there" ]
    [ ! -e /etc/passwd ]
"""


def build(tmp_path: Path, text: str, network: Network = "none") -> tuple[PackedImage, list[str]]:
    said: list[str] = []
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "note").write_text("of this machine\n")
    (tmp_path / "tree/deep").mkdir(parents=True, exist_ok=True)
    (tmp_path / "tree/deep/leaf").write_text("leaf")
    (tmp_path / "image.def").write_text(text)

    def stored(name: str, directory: Path) -> Configured | None:
        if name != "team/base:1":
            return None
        image_directory(directory)
        return Configured({"BELOW": "of the base"})

    async def scenario() -> PackedImage:
        async with BubblewrapBackend(tmp_path / "scratch") as opened:

            async def backend() -> SandboxBackend:
                return opened

            builder = Builder(
                home=home, stored=stored, backend=backend, network=network, timeout_s=60.0, tell=said.append
            )  # fmt: skip
            return await builder.build(tmp_path / "image.def")

    return asyncio.run(scenario()), said


def laid_out(packed: PackedImage, target: Path) -> Path:
    with Path(packed.layer.path).open("rb") as file:
        unpack(file, target, digest=packed.layer.digest)
    return target


@pytest.mark.parametrize("base", ["team/base:1", "base"])
def test_a_script_makes_an_image_out_of_a_base(tmp_path: Path, base: str) -> None:
    image_directory(tmp_path / "base")
    text = TEXT.format(base=base)
    packed, _ = build(tmp_path, text)
    root = laid_out(packed, tmp_path / "root")
    below = "of the base" if base == "team/base:1" else ""
    assert (root / "made").read_text() == f"of this machine\n{below}\n"
    assert (root / "opt/tree/deep/leaf").read_text() == "leaf" and (root / "new").is_dir()
    assert not (root / "etc/passwd").exists() and (root / "bin/bash").exists()
    assert packed.configured.env == {"GREETING": "hello there", **({"BELOW": below} if below else {})}


def test_apptainer_runs_the_script_where_it_may_have_a_network(tmp_path: Path) -> None:
    text = TEXT.format(base="base").replace("rm -r /etc/passwd", "")
    text = text.replace("[ ! -e /etc/passwd ]", "").replace('echo "$BELOW"', "echo")
    networks: tuple[Network, ...] = ("none", "open")
    for network in networks:
        place = tmp_path / network
        place.mkdir()
        image_directory(place / "base")
        packed, _ = build(place, text, network)
        root = laid_out(packed, place / "root")
        assert (root / "made").read_text() == "of this machine\n\n" and (root / "new").is_dir()
        assert not any((root / name).exists() for name in (".singularity.d", "environment", "singularity"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("mkdir /new", "echo why; exit 7"), r"%post ended with 7: .*why"),
        (lambda text: text.replace("mkdir /new", "cat </dev/tcp/1.1.1.1/53"), "%post ended with [12]: .*network"),
        (lambda text: text.replace('= "hello there"', "= bye"), "%test ended with 1"),
        (lambda text: text.replace("note /opt/note", "nothing /opt/x"), "there is no nothing beside"),
        (lambda text: text.replace("note /opt/note", "~nosuchuser/x /x"), "no such home directory"),
        (lambda text: text.replace("From: team/base:1", "From: ~nosuchuser/x"), "no such home directory"),
        (lambda text: text.replace("From: team/base:1", "From: " + "x" * 300), "neither an image of the store"),
        (lambda text: text.replace("From: team/base:1", "From: gone"), "neither an image of the store nor a file"),
        (
            lambda text: text.replace("Bootstrap: localimage", "Bootstrap: oras").replace("base:1", "x.invalid/base"),
            "apptainer cannot build the base oras://",
        ),
    ],
)
def test_what_fails_is_said_in_one_line(tmp_path: Path, change: Callable[[str], str], words: str) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        build(tmp_path, change(TEXT.format(base="team/base:1")))
    assert "\n" not in str(caught.value)
