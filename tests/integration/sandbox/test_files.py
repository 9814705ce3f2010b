"""The contract of every backend's files: confined, atomic, bounded."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandbox.errors import FilesError
from sandbox.protocols import Sandbox, SandboxLimits, SandboxSpec
from tests.integration.sandbox.grounds import BACKENDS, in_sandbox


@pytest.fixture(params=(*BACKENDS, "fake"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=BACKENDS)
def shell_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/new/deep/ä b.txt", "grüße\n")
        await sandbox.files.write("work/bytes", b"\x00\xff")
        await sandbox.files.write("/work/bytes", b"\x00\xfe", mode=0o755)
        assert await sandbox.files.read_text("/work/new/deep/ä b.txt") == "grüße\n"
        assert await sandbox.files.read("/work/new/../bytes") == b"\x00\xfe"
        names = [(entry.name, entry.kind, entry.size_bytes) for entry in await sandbox.files.list("/work")]
        assert names == [("bytes", "file", 2), ("new", "directory", 0)]

    in_sandbox(name, tmp_path, body)


def test_replace_wants_one_occurrence(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/a.py", "one\ntwo\ntwo\n")
        await sandbox.files.replace("/work/a.py", "one\n", "1\n")
        assert await sandbox.files.read("/work/a.py") == b"1\ntwo\ntwo\n"
        for old, count in (("two", 2), ("three", 0), ("", 0)):
            with pytest.raises(FilesError, match=f"occurs {count} times"):
                await sandbox.files.replace("/work/a.py", old, "x")

    in_sandbox(name, tmp_path, body)


def test_upload_and_download(name: str, tmp_path: Path) -> None:
    source, target, scratch = tmp_path / "source", tmp_path / "target", tmp_path / "scratch"
    source.write_bytes(os.urandom(3_000_000))

    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.upload(source, "/work/up/loaded")
        await sandbox.files.download("/work/up/loaded", target)
        with pytest.raises(FilesError, match="cannot download"):
            await sandbox.files.download("/work/missing", tmp_path / "never")

    in_sandbox(name, scratch, body)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch", "source", "target"]


@pytest.mark.parametrize("path", ["/work/missing", "/work", "/", "", "/work/x/y", "/work/nul\0", "/work/pipe"])
def test_what_cannot_be_read_is_refused(name: str, tmp_path: Path, path: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/x", "a file")
        if name != "fake":
            await sandbox.shell.run("mkfifo pipe")
        with pytest.raises(FilesError, match="cannot read") as caught:
            await asyncio.wait_for(sandbox.files.read(path), 20.0)
        assert caught.value.boundary == "files" and caught.value.detail["path"] == path

    in_sandbox(name, tmp_path, body)


@pytest.mark.parametrize("path", ["/", "", "/work", "/work/x/y", "/work/..", "/work/nul\0"])
def test_what_cannot_be_written_is_refused(name: str, tmp_path: Path, path: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/x", "a file")
        with pytest.raises(FilesError):
            await sandbox.files.write(path, "data")
        assert [entry.name for entry in await sandbox.files.list("/work")] == ["x"]

    in_sandbox(name, tmp_path, body)


def test_sizes_are_bounded(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/fits", b"x" * 1000)
        with pytest.raises(FilesError, match="1001 bytes; at most 1000"):
            await sandbox.files.write("/work/big", b"x" * 1001)
        with pytest.raises(FilesError, match="1000 bytes; at most 10"):
            await sandbox.files.read("/work/fits", limit_bytes=10)
        with pytest.raises(FilesError, match="at most 1000"):
            await sandbox.files.replace("/work/fits", "x" * 1000, "y" * 1001)

    in_sandbox(name, tmp_path, body, SandboxSpec(limits=SandboxLimits(file_bytes=1000)))


def test_no_link_leads_out(shell_name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    scratch = tmp_path / "scratch"

    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run(f"ln -s {secret} out; ln -s {tmp_path} outdir; ln -s / all; ln -s ../../../../.. up")
        await sandbox.shell.run(f"ln -s {'../' * 30}{str(secret).lstrip('/')} climbing; ln -s loop loop")
        for path in ("out", "outdir/secret", "climbing", f"all{secret}", f"up{secret}", "loop", f"../../..{secret}"):
            with pytest.raises(FilesError):
                await sandbox.files.read(f"/work/{path}")
        for path in ("outdir/new", f"all{tmp_path}/new", f"up{tmp_path}/new"):
            await sandbox.files.write(f"/work/{path}", "inside") if path != "outdir/new" else None
        await sandbox.files.write("/work/out", "inside")
        assert await sandbox.files.read("/work/out") == b"inside"
        entries = {entry.name: entry for entry in await sandbox.files.list("/work")}
        assert entries["out"].kind == "file" and entries["loop"].target == "loop"
        with pytest.raises(FilesError):
            await sandbox.files.write("/work/loop/x", "data")

    in_sandbox(shell_name, scratch, body)
    assert secret.read_text() == "host"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch", "secret"]


def test_magic_links_do_not_lead_out(isolating: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("ln -s /proc/1/root root; ln -s /proc/self/fd/0 fd; ln -s /proc/self/environ env")
        for path in ("root/etc/passwd", "fd", "env", "/proc/self/environ", "/proc/1/root/etc/passwd"):
            with pytest.raises(FilesError):
                await sandbox.files.read(path if path.startswith("/") else f"/work/{path}")

    in_sandbox(isolating, tmp_path, body)


def test_a_writer_racing_with_links_stays_inside(shell_name: str, tmp_path: Path) -> None:
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    outside.chmod(0o777)

    async def body(sandbox: Sandbox) -> None:
        swap = f"while :; do mkdir swap; rmdir swap || rm -rf swap; ln -s {outside} swap; rm swap; done"
        await sandbox.shell.run(f"({swap}) >/dev/null 2>&1 &")
        for number in range(200):
            try:
                await sandbox.files.write(f"/work/swap/f{number}", "x")
            except FilesError:
                continue

    in_sandbox(shell_name, scratch, body)
    assert list(outside.iterdir()) == []


def test_the_shell_sees_whole_files_only(shell_name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/file", "a" * 100_000)
        check = (
            "for i in $(seq 300); do read -r x <file; case ${#x} in 100000|200000) ;; *) echo torn ${#x};; esac; done"
        )
        reading = asyncio.create_task(sandbox.shell.run(check))
        while not reading.done():
            await sandbox.files.write("/work/file", "b" * 200_000)
            await sandbox.files.write("/work/file", "a" * 100_000)
        assert (await reading).output == ""
        assert (await sandbox.shell.run("ls -A")).output == "file\n"

    in_sandbox(shell_name, tmp_path, body)


def test_files_follow_a_restarted_shell(isolating: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/before", "1")
        assert (await sandbox.shell.run("exit")).restarted
        await sandbox.files.write("/work/after", "2")
        assert (await sandbox.shell.run("cat before after")).output == "12"

    in_sandbox(isolating, tmp_path, body)
