"""Sums that are done in an image of the store: chosen by `task._target_`."""

from __future__ import annotations

from typing import Any

import msgspec

from stages.protocols import Environment, Row
from workflows.tasks.arith import ArithTask


class InImage(ArithTask):
    """Sums in another image than the host; its reward says nothing where the image is not what runs."""

    name = "in-image"

    def __init__(self, image: str, **options: Any) -> None:
        super().__init__(**options)
        self._image = image

    def environment(self, row: Row) -> Environment:
        return msgspec.structs.replace(super().environment(row), image=self._image)

    async def prepare(self, sandbox: Any, row: Row) -> None:
        await super().prepare(sandbox, row)
        result = await sandbox.shell.run("cat /image-mark; echo $MARK")
        if result.output != "of the image\nof its config\n":
            raise AssertionError(f"this is another image: {result.output}")
