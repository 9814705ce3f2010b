"""Where the kernel mounts no overlay: the probe finds out, sandboxes get copies, and their layers mean the same."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from sandbox.apptainer import ApptainerBackend
from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import FilesError, LayerError, SandboxError
from sandbox.layers import unpack
from sandbox.protocols import SandboxSpec
from tests.integration.sandbox.grounds import QUICK, image_directory
from tests.integration.sandbox.test_layer_chain import FIRST, LOOK, used

BACKENDS: dict[str, type[BubblewrapBackend]] = {"bubblewrap": BubblewrapBackend, "apptainer": ApptainerBackend}
REFUSING = """#!/bin/sh
# A mount for which no overlay exists, as on kernels that mount none for ordinary users.
for word; do [ "$word" != overlay ] || no=1; done
grep -qs overlay fstab && no=1
[ -z "$no" ] || { echo "mount: merged: unknown filesystem type 'overlay'." >&2; exit 32; }
exec MOUNT "$@"
"""
CHANGES = """
rm -r gone; rm -r replaced; mkdir replaced; echo 5 >replaced/five; mv a/b a/moved; rm a/one; echo new >a/one; mkdir a/b
touch -r a/hard stamp; printf 9 | dd of=a/hard conv=notrunc status=none; touch -r stamp a/hard; rm stamp
rm /etc/inputrc; mv /etc/skel /etc/other; chmod 700 /var/cache; mv a c; mkdir a; echo 6 >a/hard
mkdir -m 0 closed; rm /tmp/* 2>/dev/null; echo x >/root/x
"""
"""Also a change that size and times do not show, a directory that took another's place, and one that nobody enters."""


@pytest.fixture
def no_overlays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `mount` before the real one."""
    real = shutil.which("mount")
    assert real
    place = tmp_path / "bin"
    place.mkdir()
    (place / "mount").write_text(REFUSING.replace("MOUNT", real))
    (place / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=":")


@pytest.mark.usefixtures("no_overlays")
def test_the_probe_finds_that_there_are_none_and_what_is_copied_isolates(
    isolating: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with BACKENDS[isolating](tmp_path / "scratch") as backend:
            with caplog.at_level(logging.WARNING):
                await backend.probe()
            assert backend.copied and "unknown filesystem type 'overlay'" in caplog.text
            async with backend.create(SandboxSpec(limits=QUICK)) as sandbox:
                seen = await sandbox.shell.run(
                    "pwd; touch /usr/mine; echo x >/usr/bin/env; echo y >/etc/mine; cat /etc/mine"
                )
                assert seen.output.count("Read-only file system") == 2 and seen.output.endswith("\ny\n")
                assert not Path("/usr/mine").exists() and not Path("/etc/mine").exists()
                assert any(entry.name == "bash" for entry in await sandbox.files.list("/usr/bin"))
                with pytest.raises(FilesError, match="Read-only"):
                    await sandbox.files.write("/usr/mine", "x")
                deep = 'import os\\nfor i in range(600):\\n  os.mkdir("d"); os.chdir("d")'
                await sandbox.shell.run(f"cd /work; python3 -I -c $'{deep}'")
                with pytest.raises(LayerError, match="nested deeper than 256"):
                    await sandbox.pack()
                await sandbox.reset()
                assert (await sandbox.shell.run("ls /etc/mine")).exit_code != 0

    asyncio.run(scenario())


def test_its_layers_are_those_of_overlays(isolating: str, tmp_path: Path) -> None:
    """The same work, on a layer, packs to the same digest; and whoever comes next sees the same."""

    async def scenario() -> None:
        first, digests, seen = tmp_path / "first", [], []
        for copied in (False, True):
            async with BACKENDS[isolating](tmp_path / "scratch") as backend:
                backend.copied = copied
                layer = tmp_path / f"layer{copied}"
                _, packed = await used(backend, (), FIRST, first / str(copied))
                digests.append(packed.digest)
                _, changed = await used(backend, (str(first / str(copied)),), CHANGES, layer)
                backend.copied = not copied
                looked, empty = await used(backend, (str(first / str(copied)), str(layer)), LOOK.replace("a/", "c/"))
                seen.append((looked.output, empty.entries))
                assert changed.digest != packed.digest
        assert digests[0] == digests[1]
        assert seen[0][0] == seen[1][0]
        assert seen[0][1] == seen[1][1] == 0
        assert "gone is gone" in seen[0][0] and "c/moved" in seen[0][0]

    asyncio.run(scenario())


def test_an_upper_is_taken_up_and_an_image_stays_as_it_is(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        image = await asyncio.to_thread(image_directory, tmp_path / "image")
        async with BACKENDS[isolating](tmp_path / "scratch") as backend:
            backend.copied = True
            saved, again = tmp_path / "saved", tmp_path / "again"
            made, packed = await used(
                backend, (), "rm /etc/passwd; mkdir /usr/new; echo x >/usr/new/file", saved, str(image)
            )
            assert made.exit_code == 0 and (image / "etc/passwd").exists() and not (image / "usr/new").exists()
            spec = SandboxSpec(image=str(image), upper=str(saved), limits=QUICK)
            async with backend.create(spec) as sandbox:
                assert (await sandbox.shell.run("cat /usr/new/file; ls /etc")).output == "x\n"
                unchanged = await sandbox.pack()
                assert unchanged.digest == packed.digest and not saved.exists()
                with Path(unchanged.path).open("rb") as file:
                    await asyncio.to_thread(unpack, file, again, digest=unchanged.digest)
            with pytest.raises(SandboxError, match="changes /usr, and without overlays"):
                await used(backend, (str(again),), "true")

    asyncio.run(scenario())
