"""A sandbox that is reset is what its image and layers make it: no change and no process of before is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.errors import FilesError
from sandbox.protocols import Sandbox
from tests.integration.sandbox.grounds import BACKENDS, in_sandbox


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_changed_is_gone_and_the_sandbox_goes_on(tmp_path: Path, backend: str) -> None:
    async def body(sandbox: Sandbox) -> tuple[str, bool, bytes]:
        await sandbox.reset()  # before its first use there is nothing to throw away
        await sandbox.files.write("/work/a", "1")
        await sandbox.shell.run("export X=1; sleep 1000 & echo $! > b; mkdir -p ../tmp/deep/er; chmod 0 ../tmp/deep")
        await sandbox.reset()
        with pytest.raises(FilesError):
            await sandbox.files.read("/work/a")
        result = await sandbox.shell.run('echo "[$X]"; ls; jobs; ls ../tmp')
        await sandbox.files.write("/work/c", "2")
        await sandbox.reset()
        done = await sandbox.execute(("/bin/sh", "-c", "ls -a"), cwd="/work")
        return result.output, result.timed_out, done.output

    output, timed_out, listed = in_sandbox(backend, tmp_path, body)
    assert output.strip() == "[]" and not timed_out
    assert listed.split() == [b".", b".."]
