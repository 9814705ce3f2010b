"""The editor and the patch tool on real files: what they do, and what the agent reads of its mistakes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import FilesError
from sandbox.fake import FakeBackend
from sandbox.protocols import Sandbox, SandboxSpec
from workflows.tools import editor, patch
from workflows.tools.toolbox import TOOLS, schemas


def on_files(scratch: Path, body: Callable[[Sandbox], Coroutine[Any, Any, None]]) -> None:
    async def scenario() -> None:
        async with FakeBackend(scratch, {":": ""}) as backend:
            await body(backend.create(SandboxSpec()))

    asyncio.run(scenario())


def test_a_file_is_made_edited_and_changed_back(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        async def edit(command: str, **more: object) -> str:
            return await editor.call(sandbox, {"command": command, "path": "/work/a.py", **more}, 5.0)

        assert await edit("create", file_text="one\ntwo\nthree\n") == "/work/a.py was made."
        assert "it is there already" in await edit("create", file_text="x")
        assert await edit("str_replace", old_str="two\n", new_str="2\nzwei\n") == (
            "/work/a.py was edited:\n     1\tone\n     2\t2\n     3\tzwei\n     4\tthree"
        )
        assert "     2\tmiddle\n" in await edit("insert", insert_line=1, new_str="middle")
        assert await edit("view", view_range=[2, 3]) == "     2\tmiddle\n     3\t2"
        assert "occurs 0 times" in await edit("str_replace", old_str="absent", new_str="")
        for _ in range(3):
            assert "taken back" in await edit("undo_edit")
        assert "no edit" in await edit("undo_edit") and "No such file" in await edit("view")

    on_files(tmp_path, body)


def test_the_mode_stays_and_a_link_is_followed(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/real", "old\n", mode=0o755)
        root = next(tmp_path.glob("*/s1/root"))
        (root / "work/link").symlink_to("real")
        await sandbox.files.replace("/work/link", "old", "new")
        assert (root / "work/link").is_symlink() and (root / "work/real").read_text() == "new\n"
        assert (root / "work/real").stat().st_mode & 0o777 == 0o755
        await sandbox.files.undo("/work/link")
        assert (root / "work/real").read_text() == "old\n" and (root / "work/link").is_symlink()

    on_files(tmp_path, body)


def test_a_directory_is_listed_two_levels_deep(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        for name in ("a/b/c", "a/d", ".hidden", "e"):
            await sandbox.files.write(f"/work/{name}", "")
        assert await editor.call(sandbox, {"command": "view", "path": "/work"}, 5.0) == "a/\na/b/\na/d\ne"

    on_files(tmp_path, body)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"command": "view"}, "needs path"),
        ({"command": "delete", "path": "/a"}, "command is one of view"),
        ({"command": "view", "path": "a"}, "did you mean /a"),
        ({"command": "insert", "path": "/a", "new_str": "x"}, "insert needs insert_line"),
        ({"command": "insert", "path": "/a", "insert_line": True, "new_str": "x"}, "a whole number; got bool"),
        ({"command": "view", "path": "/a", "view_range": [1]}, "two line numbers"),
        ({"command": "view", "path": "/a", "why": 1}, "got why"),
        ({"command": "view", "path": "/a\0"}, "NUL"),
    ],
)
def test_wrong_arguments_are_told_to_the_agent(tmp_path: Path, given: dict[str, object], said: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        told = await editor.call(sandbox, given, 5.0)
        assert told.startswith("error: ") and said in told

    on_files(tmp_path, body)


DIFF = """--- a/one
+++ b/one
@@ -1 +1 @@
-1
+eins
--- /dev/null
+++ b/deep/new
@@ -0,0 +1 @@
+new
--- a/two
+++ /dev/null
@@ -1 +0,0 @@
-2
"""


def test_a_patch_is_applied_wholly_or_not_at_all(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/one", "1\n")
        told = await patch.call(sandbox, {"patch": DIFF}, 5.0)
        assert "/work/two, which is not there" in told
        assert await sandbox.files.read("/work/one") == b"1\n"
        assert [entry.name for entry in await sandbox.files.list("/work")] == ["one"]
        await sandbox.files.write("/work/two", "2\n")
        told = await patch.call(sandbox, {"patch": DIFF}, 5.0)
        assert told == "/work/one was changed.\n/work/deep/new was changed.\n/work/two was changed."
        assert await sandbox.files.read("/work/one") == b"eins\n"
        assert [entry.name for entry in await sandbox.files.list("/work")] == ["deep", "one"]

    on_files(tmp_path, body)


def test_a_patch_stays_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("1\n")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.files.write("/work/x", "")
        root = next(tmp_path.glob("*/s1/root"))
        (root / "work/out").symlink_to(tmp_path / "outside")
        (root / "work" / os.fsdecode(b"d\xff")).mkdir()
        assert "d\ufffd/" in await editor.call(sandbox, {"command": "view", "path": "/work"}, 5.0)
        for name in ("../../../../outside", "out"):
            with pytest.raises(FilesError):
                await sandbox.files.patch(f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-1\n+2\n", directory="/work")
        assert (tmp_path / "outside").read_text() == "1\n"

    on_files(tmp_path, body)


def test_tools_are_chosen_by_name() -> None:
    assert [one["function"]["name"] for one in schemas(["bash", "str_replace_editor"])] == [
        "bash",
        "str_replace_editor",
    ]
    assert set(TOOLS) == {"bash", "python", "str_replace_editor", "apply_patch"}
    with pytest.raises(ValueError, match="no tool is called 'vi'"):
        schemas(["vi"])
