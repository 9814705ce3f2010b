"""Layers between sandboxes: what one writes and deletes, the next one sees, on every backend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.layers import unpack
from sandbox.protocols import CommandResult, PackedLayer, SandboxBackend, SandboxSpec
from tests.integration.sandbox.grounds import BACKENDS, ISOLATING, QUICK, backend_named, image_directory


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def used(
    backend: SandboxBackend, layers: tuple[str, ...], commands: str, target: Path | None = None, image: str = "host"
) -> tuple[CommandResult, PackedLayer]:
    """Run commands on layers, pack, and unpack to `target`."""
    async with backend.create(SandboxSpec(image=image, layers=layers, limits=QUICK)) as sandbox:
        result = await sandbox.shell.run(commands)
        packed = await sandbox.pack()
        if target is not None:
            await asyncio.to_thread(_unpack, packed, target)
    return result, packed


def _unpack(packed: PackedLayer, target: Path) -> None:
    with Path(packed.path).open("rb") as file:
        unpack(file, target, digest=packed.digest)


FIRST = """
mkdir -p a/b/c gone replaced; echo 1 >a/one; echo 2 >a/b/two; echo 3 >gone/three; echo 4 >replaced/four
ln -s one a/link; ln a/one a/hard; chmod 750 a/b; chmod 600 a/b/two; touch 'new
line' "$(printf 'b\\xff\\xfe')" empty; mkfifo pipe
"""
SECOND = """
rm -r gone; rm -r replaced; mkdir replaced; echo 5 >replaced/five
rm a/one; echo more >>a/b/two; chmod 640 a/b/two
"""
LOOK = """
ls -R; cat a/hard a/b/two replaced/*; stat -c '%a %F %n' a a/b a/b/two a/link 2>/dev/null; readlink a/link
[ -e gone ] || echo gone is gone; [ -e replaced/four ] || echo four is gone; [ -e a/one ] || echo one is gone
"""


def test_a_chain_of_layers_is_what_the_first_sandbox_had(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(name, tmp_path / "scratch") as backend:
            one, two = tmp_path / "one", tmp_path / "two"
            _, packed = await used(backend, (), FIRST, one)
            assert packed.skipped == (1 if name in ISOLATING else 0)  # the FIFO; without isolation it is not copied
            second, _ = await used(backend, (str(one),), SECOND + "\n" + LOOK, two)
            third, empty = await used(backend, (str(one), str(two)), LOOK)
            assert second.exit_code == 0 and "four is gone" in second.output and "one is gone" in second.output
            assert third.output == second.output
            assert "gone is gone" in third.output and "5\n" in third.output and "2\nmore\n" in third.output
            if name in ISOLATING:
                assert empty.entries == 0

    asyncio.run(scenario())


def test_the_same_work_gives_the_same_digest(name: str, tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with backend_named(name, tmp_path) as backend:
            return [(await used(backend, (), FIRST))[1].digest for _ in range(2)]

    first, second = asyncio.run(scenario())
    assert first == second


def test_changes_of_usr_and_of_the_root_are_one_layer(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(isolating, tmp_path / "scratch") as backend:
            made = (
                "mkdir -p /usr/mine /etc/mine; echo tool >/usr/mine/tool; echo conf >/etc/mine/conf; rm -f /etc/inputrc"
            )
            layer = tmp_path / "layer"
            await used(backend, (), made, layer)
            assert (layer / "usr/mine/tool").is_file() and (layer / "etc/mine/conf").is_file()
            seen, _ = await used(
                backend, (str(layer),), "cat /usr/mine/tool /etc/mine/conf; ls /usr/bin/env; ls /etc/inputrc"
            )
            assert seen.output.startswith("tool\nconf\n/usr/bin/env\n") and "cannot access" in seen.output

    asyncio.run(scenario())


def test_layers_stack_on_an_image_directory(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        image = str(await asyncio.to_thread(image_directory, tmp_path / "image"))
        async with backend_named(isolating, tmp_path / "scratch") as backend:
            layer = tmp_path / "layer"
            await used(backend, (), "rm /etc/passwd; mkdir /usr/new; echo x >/usr/new/file", layer, image)
            seen, packed = await used(backend, (str(layer),), "cat /usr/new/file; cat /etc/passwd", image=image)
            assert seen.output.startswith("x\n") and seen.exit_code != 0 and packed.entries == 0

    asyncio.run(scenario())


def test_a_pack_takes_the_declared_paths_alone(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(name, tmp_path / "scratch") as backend, backend.create(SandboxSpec()) as sandbox:
            for path in (
                "/work/repo/src/a.py",
                "/work/repo/src/__pycache__/a.pyc",
                "/work/repo/.git/HEAD",
                "/work/notes",
                "/tmp/x",
            ):
                await sandbox.files.write(path, path)
            packed = await sandbox.pack(paths=["/work/repo"], exclude=["__pycache__", "work/repo/.git"])
            target = tmp_path / "layer"
            await asyncio.to_thread(_unpack, packed, target)
            found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
            assert found == ["work/repo/src/a.py"]

    asyncio.run(scenario())


def test_a_sandbox_that_did_nothing_packs_an_empty_layer(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(isolating, tmp_path / "scratch") as backend:
            spec = SandboxSpec(workspace=())
            async with backend.create(spec) as one, backend.create(spec) as other:
                packed, again = await one.pack(), await other.pack()
            assert packed.entries == 0 and packed.digest == again.digest

    asyncio.run(scenario())


def test_what_nobody_may_read_is_packed_all_the_same(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            backend_named(isolating, tmp_path) as backend,
            backend.create(SandboxSpec(limits=QUICK)) as sandbox,
        ):
            await sandbox.shell.run("mkdir -p d/e; echo x >d/e/f; chmod 000 d/e/f d/e d")
            packed = await sandbox.pack()
            modes = await sandbox.shell.run("stat -c %a d; chmod 755 d; stat -c %a d/e")
            assert modes.output == "0\n0\n" and packed.entries == 4

    asyncio.run(scenario())
