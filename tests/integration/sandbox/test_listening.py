"""A socket of the worker's on a sandbox's own loopback: reached from inside alone, without a process."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from sandbox.errors import SandboxError
from sandbox.protocols import Sandbox
from tests.integration.sandbox.grounds import BACKENDS, in_sandbox


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"heard " + await reader.readline())
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_what_runs_inside_reaches_the_worker(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> tuple[str, bool]:
        before = (await sandbox.shell.run("ls /proc | grep -c '^[0-9]'")).output
        server = await asyncio.start_server(_answer, sock=await sandbox.listen())
        port = server.sockets[0].getsockname()[1]
        said = await sandbox.shell.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo me >&3; cat <&3; exec 3>&-")
        after = (await sandbox.shell.run("ls /proc | grep -c '^[0-9]'")).output
        with socket.socket() as outside:
            reached = outside.connect_ex(("127.0.0.1", port)) == 0
        server.close()
        assert name == "none" or before == after
        return said.output, reached

    output, reached = in_sandbox(name, tmp_path, body)
    assert output == "heard me\n"
    assert reached == (name == "none")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sandbox_that_has_stopped_gives_none(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.listen()

    in_sandbox(name, tmp_path, body)
