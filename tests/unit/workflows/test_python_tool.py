"""The Python tool: what the agent reads of results and of its own mistakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import PythonUnavailable, SandboxError
from sandbox.fake import FakeBackend
from sandbox.protocols import CellResult, SandboxSpec
from workflows.tools import python


def observed(text: str = "", error: str | None = None, images: tuple[str, ...] = (), **flags: bool) -> str:
    return python.observation(CellResult(text, error, images, 0.1, **flags), 30.0)


def test_text_and_error_are_given_in_order():
    assert observed("15\n") == "15"
    assert observed("a\n", "ValueError: b") == "a\nValueError: b"
    assert observed() == ""


def test_what_is_out_of_the_ordinary_is_said():
    assert observed("a...b\n", truncated=True).splitlines()[1].startswith("[output was too long")
    assert observed("", "KeyboardInterrupt", timed_out=True).endswith(
        "[stopped after 30 s: the cell did not end in time]"
    )
    assert "variables and imports of earlier cells are gone" in observed("2\n", restarted=True)
    assert observed("", None, ("iVBOR",)) == "[an image was shown]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({}, "got nothing"), ({"code": 3}, "got int"), ({"code": " \n"}, "empty"), ({"code": "1", "cell": 2}, "got cell")],
)
def test_wrong_arguments_are_told_to_the_agent(arguments: dict[str, Any], said: str):
    assert said in (python.wrong_arguments(arguments) or "")


def test_a_call_runs_its_code_and_a_python_that_cannot_start_is_told_to_the_agent(tmp_path: Path):
    class Broken:
        error: SandboxError = PythonUnavailable("no Python kernel starts in this sandbox: no python3")

        @property
        def python(self) -> Any:
            return self

        async def run(self, code: str, timeout_s: float) -> CellResult:
            raise self.error

    async def scenario() -> None:
        async with FakeBackend(tmp_path, cells={"1+1": "2\n"}) as backend:
            sandbox = backend.create(SandboxSpec())
            assert await python.call(sandbox, {"code": "1+1"}, 5.0) == "2"
            assert "no answer" in await python.call(sandbox, {"code": "2+2"}, 5.0)
            assert sandbox.python.cells == ["1+1", "2+2"]
        broken: Any = Broken()
        assert await python.call(broken, {"code": "1"}, 5.0) == f"error: {broken.error}"
        broken.error = SandboxError("the sandbox has stopped")
        with pytest.raises(SandboxError, match="has stopped"):
            await python.call(broken, {"code": "1"}, 5.0)

    asyncio.run(scenario())
