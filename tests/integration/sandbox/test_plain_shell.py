"""sandbox=none: how its shell starts, what goes with it at its end, and what it says was changed."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import weakref
from pathlib import Path

import pytest

import sandbox.pty_sandbox
from sandbox.errors import SpawnerError
from sandbox.limits import Bounds
from sandbox.none import NoneBackend
from sandbox.protocols import Sandbox, SandboxSpec
from tests.integration.sandbox.grounds import QUICK, alive, in_sandbox, wait_until
from tests.support.waiting import eventually

SPEC = SandboxSpec(workspace=("/workspace",), limits=QUICK)


def test_the_shell_starts_as_programs_expect_it(tmp_path: Path) -> None:
    async def look(sandbox: Sandbox) -> dict[str, str]:
        asked = {
            "session": "[ $(ps -o sid= -p $$) = $$ ] && echo leads",
            "terminal": "tty < /dev/tty > /dev/null && echo controlling",
            "modes": "stty -a | grep -o -- '-echo ' && stty size",
            "umask": "umask",
            "ignored": "grep SigIgn /proc/self/status",
            "descriptors": "ls /proc/self/fd | tr '\\n' ' '",
            "oom": "cat /proc/self/oom_score_adj",
            "interrupt": "sh -c 'kill -INT $$; echo survived'",
        }
        return {name: (await sandbox.shell.run(command)).output.strip() for name, command in asked.items()}

    said = in_sandbox("none", tmp_path, look, SPEC)
    assert said["session"] == "leads"
    assert said["terminal"] == "controlling"
    assert said["modes"].split() == ["-echo", "50", "200"]
    assert said["umask"] == "0022"
    assert int(said["ignored"].split()[1], 16) & 0b11011 << 14 == 0  # TERM, and others that the spawner is deaf to
    assert int(said["ignored"].split()[1], 16) & 1 << 0 == 0  # HUP
    assert said["descriptors"].split() == ["0", "1", "2", "3"]  # 3 is what `ls` reads
    assert said["oom"] == "1000"
    assert "survived" not in said["interrupt"]


async def test_limits_hold_from_the_first_command_on(tmp_path: Path) -> None:
    bounds = Bounds(file_mib=1)
    async with NoneBackend(tmp_path, bounds) as backend, backend.create(SPEC) as sandbox:
        result = await sandbox.shell.run("ulimit -f; head -c 2097152 /dev/zero > big; echo $?")
        assert result.output.split()[0] == "1024"
        assert result.output.split()[-1] != "0"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with NoneBackend(tmp_path) as backend:
        with pytest.raises(SpawnerError, match="no-such-program"):
            await backend._spawner.spawn(["no-such-program"], env={"PATH": "/bin"}, cwd="/", timeout_s=10, light=True)
        with pytest.raises(SpawnerError, match="/nowhere"):
            await backend._spawner.spawn(["bash"], env={"PATH": "/bin"}, cwd="/nowhere", timeout_s=10, light=True)
        async with backend.create(SPEC) as sandbox:
            assert (await sandbox.shell.run("echo on")).output == "on\n"


async def test_what_ran_away_from_its_shell_ends_with_it_and_nothing_else_does(tmp_path: Path) -> None:
    run_away = "(setsid sh -c 'trap : TERM HUP INT; echo $$ > away; sleep 300; sleep 300' > /dev/null 2>&1 &)"
    async with NoneBackend(tmp_path) as backend:
        one, other = backend.create(SPEC), backend.create(SPEC)
        pids = []
        for sandbox in (one, other):
            await sandbox.shell.run(f"{run_away}; sleep 300 &")
            written = await sandbox.shell.run("until [ -s away ]; do :; done; cat away")
            pids.append(int(written.output))
        await one.stop()
        await asyncio.to_thread(wait_until, "it ends", lambda: not alive(pids[0]))
        assert alive(pids[1])
        await other.stop()
        await asyncio.to_thread(wait_until, "it ends", lambda: not alive(pids[1]))


@pytest.mark.parametrize(
    "change",
    ["", "cat kept", "echo two > kept", "touch new", "rm kept", "chmod 600 kept", "mkdir d", "ln kept link",
     "sed -i s/one/two/ kept; touch -d @1 kept"],
)  # fmt: skip
async def test_a_workspace_is_packed_when_anything_in_it_was_changed(tmp_path: Path, change: str) -> None:
    layer = tmp_path / "layer/workspace"
    layer.mkdir(parents=True)
    (layer.parent / "tmp").mkdir()
    (layer / "kept").write_text("one\n")
    os.utime(layer / "kept", (1, 1))
    spec = SandboxSpec(workspace=("/workspace",), layers=(str(layer.parent),), limits=QUICK)
    async with NoneBackend(tmp_path / "scratch") as backend, backend.create(spec) as sandbox:
        assert (await sandbox.shell.run(change or ":")).exit_code == 0
        packed = await sandbox.pack(paths=("/workspace",))
    assert (packed.entries > 0) == (change not in {"", "cat kept"})


async def test_a_small_directory_goes_with_its_shell_however_many_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Path] = []

    def remove_tree(path: Path) -> bool:
        left.append(path)
        return True

    monkeypatch.setattr(sandbox.pty_sandbox, "remove_tree", remove_tree)
    async with NoneBackend(tmp_path) as backend:
        shells = [backend.create(SPEC) for _ in range(12)]
        for each in await asyncio.gather(*(one.shell.run("echo here > note; pwd") for one in shells)):
            assert each.exit_code == 0
        await asyncio.gather(*(one.stop() for one in shells))
        assert left == [] and not [one for one in shells if one.directory.exists()]


async def test_what_a_sandbox_held_is_freed_with_its_last_user(tmp_path: Path) -> None:
    gc.disable()
    try:
        async with NoneBackend(tmp_path) as backend:
            one = backend.create(SPEC)
            await one.shell.run("echo here > note")
            await one.open_shell().run("cat note")
            assert await one.files.read_text("/workspace/note") == "here\n"
            await one.pack(paths=("/workspace",))
            await one.stop()
            parts = [weakref.ref(part) for part in (one, one.shell, one.files, one.python)]
            del one
            await eventually(
                lambda: not any(part() for part in parts), "the loop has let go of it, and nobody else holds it"
            )
    finally:
        gc.enable()
