"""Several terminals in one sandbox: further shells beside the first, and interactive programs with their screens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sandbox.errors import SandboxError
from sandbox.protocols import Sandbox, SandboxSpec
from sandbox.pty_sandbox import PtySandbox
from sandbox.started import Spawned
from sandbox.terminal import Terminal
from tests.integration.sandbox.grounds import BACKENDS, OBEYING, QUICK, backend_named, in_sandbox, shown


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_further_shells_have_their_own_state_on_the_same_files(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("A=first; echo shared >file; mkdir d; cd d; sleep 100 & echo $! >../pid")
        two, three = sandbox.open_shell(), sandbox.open_shell()
        assert (await two.run("cat file; echo [$A]; A=second; kill -0 $(cat pid) && echo seen")).output == (
            "shared\n[]\nseen\n"
        )
        waiting = [
            asyncio.create_task(one.run(f"until [ -e {n} ]; do sleep 0.01; done")) for n, one in enumerate((two, three))
        ]
        await sandbox.shell.run("touch ../1 ../0")
        assert [result.exit_code for result in await asyncio.gather(*waiting)] == [0, 0]
        assert (await two.run("echo $A; pwd")).output.startswith("second\n")
        assert (await two.run("sleep 100", 0.2)).timed_out and (await two.run("echo $A")).output == "second\n"
        ended = await two.run("kill -9 $$")
        assert (ended.restarted, ended.exit_code) == (True, 137)
        assert (await sandbox.shell.run("echo $A")).output == "first\n"
        await three.close()
        assert (await three.run("echo anew")).output == "anew\n"

    in_sandbox(name, tmp_path, body, OBEYING)


def test_a_further_shell_ends_with_the_first_and_says_so(isolating: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        two = sandbox.open_shell()
        await two.run("B=1")
        assert (await sandbox.shell.run("exit 3")).restarted
        result = await two.run("echo [$B]")
        assert result.restarted and (result.output in ("", "[]\n"))
        assert (await two.run("echo [$B]")).output == "[]\n"
        await sandbox.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await two.run("true")
        with pytest.raises(SandboxError, match="stopped"):
            sandbox.open_shell()

    in_sandbox(isolating, tmp_path, body)


def test_a_further_shell_has_no_privilege_and_sees_nothing_more(isolating: str, tmp_path: Path) -> None:
    look = """grep -E 'CapPrm|CapEff|CapBnd|NoNewPrivs' /proc/self/status; umask; ls /; ls /proc/self/fd | wc -l
for n in /proc/self/ns/*; do readlink $n; done"""

    async def body(sandbox: Sandbox) -> None:
        first, further = await sandbox.shell.run(look), await sandbox.open_shell().run(look)
        assert further.output == first.output and "CapBnd:\t0000000000000000" in further.output

    in_sandbox(isolating, tmp_path, body)


def test_an_interactive_program_is_driven_by_keys(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("mkdir here; cd here")
        async with await sandbox.open_program(
            "read -p 'name? ' n; echo hello $n; basename $PWD; stty size; cat"
        ) as program:
            await shown(program, lambda screen: "name?" in screen.text)
            await program.send("Ada", keys=["enter"])
            greeted = await shown(program, lambda screen: screen.text.endswith("50 200"))
            assert greeted.text.split("\n") == ["name? Ada", "hello Ada", "here", "50 200"] and greeted.running
            await program.send("x\x7fy\r")
            await shown(program, lambda screen: screen.text.endswith("\ny\ny"))
            await program.send(keys=["ctrl-d"])
            done = await program.wait(30.0)
            assert (done.running, done.exit_code) == (False, 0)
        async with await sandbox.open_program("echo on; sleep 100; echo no", rows=5, columns=10) as program:
            await shown(program, lambda screen: screen.text == "on")
            await program.send(keys=["ctrl-c"])
            assert (await program.wait(30.0)).exit_code == 130

    in_sandbox(name, tmp_path, body)


def test_what_would_not_close_keeps_no_sandbox_alive(isolating: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        two = sandbox.open_shell()
        for one in (sandbox.shell, two):
            assert (await one.run("sleep 300 & echo on")).output.endswith("on\n")

        async def refuse() -> None:
            raise SandboxError("it stays", boundary="stop")

        two.close = refuse  # type: ignore[method-assign]
        with pytest.raises(SandboxError, match="it stays"):
            await sandbox.stop()
        assert isinstance(sandbox.shell, Terminal) and sandbox.shell.process is None
        two.close = type(two).close.__get__(two)  # type: ignore[method-assign]

    async def scenario() -> None:
        async with backend_named(isolating, tmp_path) as backend:
            await body(backend.create(SandboxSpec(limits=QUICK)))

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_a_shell_that_comes_while_the_sandbox_stops_goes_again(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(isolating, tmp_path) as backend:
            sandbox = backend.create(SandboxSpec(limits=QUICK))
            assert isinstance(sandbox, PtySandbox)
            spawn, started = sandbox._spawner.spawn, []

            async def late(*given: Any, **more: Any) -> Spawned:
                started.append(await spawn(*given, **more))
                stopping.append(asyncio.create_task(sandbox.stop()))
                await asyncio.sleep(0)
                return started[0]

            stopping: list[asyncio.Task[None]] = []
            with patch.object(sandbox._spawner, "spawn", late), pytest.raises(SandboxError, match="stopped"):
                await sandbox.start()
            await stopping[0]
            assert await asyncio.wait_for(asyncio.shield(started[0].exited), 30.0) != 0

    asyncio.run(scenario())


def test_a_flood_on_the_screen_is_bounded_and_its_end_is_shown(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        async with await sandbox.open_program(
            "head -c 30000000 /dev/zero | tr '\\0' x; clear; echo; echo the end"
        ) as program:
            done = await program.wait(60.0)
            assert done.text.strip().endswith("the end") and done.dropped > 20_000_000 and not done.running

    in_sandbox(name, tmp_path, body, SandboxSpec(limits=QUICK))
