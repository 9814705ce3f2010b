"""sandbox=none: a directory is the next sandbox's only where everything in it is as it was, and holds nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox.directory import DirectoryGround
from sandbox.none import NoneBackend
from sandbox.protocols import SandboxSpec
from sandbox.pty_sandbox import PtySandbox
from sandbox.smalllayers import KnownLayers
from tests.integration.sandbox.grounds import QUICK


@dataclass
class Layers:
    """A worker's sandboxes over one small layer."""

    backend: NoneBackend
    layer: Path
    seen: list[str] = field(default_factory=list)

    async def run(self, command: str, after: str = "true", *, pack: bool = True) -> str:
        """What a sandbox's command says; it is packed after that, if it is, and then runs another."""
        spec = SandboxSpec(workspace=("/workspace",), layers=(str(self.layer),), limits=QUICK)
        sandbox: PtySandbox
        async with self.backend.create(spec) as sandbox:
            said = (await sandbox.shell.run(command)).output
            if pack:
                await sandbox.pack(paths=("/workspace",))
            await sandbox.shell.run(after)
            self.seen.append(sandbox.directory.name)
        return said


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    layer = tmp_path / "layer"
    (layer / "workspace").mkdir(parents=True)
    (layer / "tmp").mkdir()
    return layer


async def test_what_was_left_as_it_was_is_the_next_ones(tmp_path: Path, layer: Path) -> None:
    async with NoneBackend(tmp_path) as backend:
        layers = Layers(backend, layer)
        for pack in (True, False, True):
            said = await layers.run("pwd; ls -A1; ls -A1 ..", pack=pack)
            assert said == f"{layers_root(layers)}/workspace\ntmp\nworkspace\n"
        assert layers.seen == ["s1", "s1", "s1"]


def layers_root(layers: Layers) -> Path:
    (home,) = layers.layer.parent.glob("rollmill-sandbox-*")
    return home / "s1/root"


@pytest.mark.parametrize(
    "change",
    [
        "echo left > note",
        "mkdir deep",
        "touch -r . ../tmp/later; rm ../tmp/later; touch -d 2000-01-01 .",
        "chmod 700 .",
        "rmdir ../tmp",
        "touch ../../beside",
    ],
)
async def test_what_was_changed_is_nobody_elses(tmp_path: Path, layer: Path, change: str) -> None:
    async with NoneBackend(tmp_path) as backend:
        layers = Layers(backend, layer)
        await layers.run("true", after=change)  # behind the back of the pack
        await layers.run(change, pack=False)
        assert await layers.run("ls -A1; stat -c %a .; ls -1 ..") == "755\ntmp\nworkspace\n"
        assert len(set(layers.seen)) == 3
        assert not [name for name in layers.seen[:2] if (layers_root(layers).parents[1] / name).exists()]


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "stopped"])
@pytest.mark.parametrize("tool", ["shell", "program"])
async def test_where_something_is_still_being_started_nobody_else_begins(
    tmp_path: Path, layer: Path, tool: str, cancelled: bool
) -> None:
    """A late start is ended with all that carry the directory's name: a shell that began there would go with it."""
    spec = SandboxSpec(workspace=("/workspace",), layers=(str(layer),), limits=QUICK)
    async with NoneBackend(tmp_path) as backend:
        await Layers(backend, layer).run("true")
        sandbox = backend.create(spec)
        if tool == "program":
            await sandbox.start()
        starting = asyncio.create_task(sandbox.start() if tool == "shell" else sandbox.execute(["/bin/sleep", "9"]))
        async with asyncio.timeout(10):
            while not backend._spawner._asked:
                await asyncio.sleep(0)
        if cancelled:
            starting.cancel()
        await sandbox.stop()
        async with backend.create(spec) as after:
            done = await after.shell.run("sleep 0.2; echo there")
            assert (done.output, done.restarted) == ("there\n", False)
        await asyncio.gather(starting, return_exceptions=True)


async def test_a_tasks_own_files_are_laid_anew(tmp_path: Path, layer: Path) -> None:
    (layer / "workspace/numbers").write_text("1 2\n")
    (layer / "workspace/numbers").chmod(0o640)
    other = tmp_path / "other"
    (other / "workspace").mkdir(parents=True)
    (other / "tmp").mkdir()
    async with NoneBackend(tmp_path) as backend:
        first, second = Layers(backend, layer), Layers(backend, other)
        said = "stat -c %a numbers; cat numbers"
        assert await first.run(said) == "640\n1 2\n"
        assert await second.run("ls -A1; pwd") == f"{layers_root(first)}/workspace\n"
        assert await first.run(said) == "640\n1 2\n"
        assert [*first.seen, *second.seen] == ["s1", "s1", "s1"]
        await first.run("true", after="echo 3 4 > numbers")
        assert await first.run(said) == "640\n1 2\n"
        assert first.seen[-1] == "s5"


def test_a_layer_that_is_large_or_strange_is_copied_in_a_thread(tmp_path: Path, layer: Path) -> None:
    spec = SandboxSpec(layers=(str(layer),))
    known = KnownLayers()
    assert known.find(spec) is not None
    for name in ("link", "large", "closed", "many"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/entry").symlink_to("/etc")
    (tmp_path / "large/entry").write_bytes(bytes(40_000))
    (tmp_path / "closed/entry").mkdir(mode=0o500)
    for number in range(20):
        (tmp_path / "many" / str(number)).mkdir()
    for name in ("link", "large", "closed", "many"):
        spec = SandboxSpec(layers=(str(tmp_path / name),))
        assert known.find(spec) is None
        assert DirectoryGround(spec, tmp_path / f"{name}-s", known).prepare_at_once() is None
