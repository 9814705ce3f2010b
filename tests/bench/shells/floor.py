"""What a shell's round trip costs at least here: a C program, built here, that talks to bash on a pty."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import sys
import time
from pathlib import Path

from ptyprocess import PtyProcess

SOURCE = Path(__file__).with_name("pty_floor.c")
_READY_S = 20.0


class Floor:
    """Measures round trips of a bare bash.

    Args:
        scratch: where the program is built.
    """

    def __init__(self, scratch: Path) -> None:
        self._program = scratch / "pty_floor"
        self.in_c = False

    async def build(self) -> None:
        """Compile it; where there is no compiler, Python with blocking calls stands in, some 5 us slower."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            return
        made = await asyncio.create_subprocess_exec(
            compiler, "-O2", "-o", str(self._program), str(SOURCE), "-lutil",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.in_c = await made.wait() == 0

    async def times(self, rounds: int) -> list[float]:
        """Seconds of each round trip; in another process, so that this one may go on meanwhile."""
        command = [str(self._program)] if self.in_c else [sys.executable, "-P", "-m", "tests.bench.shells.floor"]
        running = await asyncio.create_subprocess_exec(*command, str(rounds), stdout=asyncio.subprocess.PIPE)
        said, _ = await running.communicate()
        if running.returncode != 0:
            raise AssertionError(f"{command[0]} ended with {running.returncode}")
        return [int(line) / 1e9 for line in said.split()]

    async def together(self, rounds: int, shells: int) -> float | None:
        """Commands a second of many shells at once on one epoll in C; None without a compiler."""
        if not self.in_c:
            return None
        running = await asyncio.create_subprocess_exec(
            self._program, str(rounds), str(shells), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await running.communicate()
        if running.returncode != 0:
            raise AssertionError(f"{self._program} ended with {running.returncode}")
        return shells * rounds * 1e9 / int(said)


def main() -> None:
    """The same in Python: prints nanoseconds, one round a line."""
    child = PtyProcess.spawn(["bash", "--norc", "--noprofile", "--noediting", "-i"], echo=False, env={"PS1": ""})
    try:
        os.write(child.fd, b"stty raw -echo; PS1=$'\\001'\n")
        while b"\1" not in os.read(child.fd, 4096):
            select.select([child.fd], [], [], _READY_S)
        for _ in range(int(sys.argv[1])):
            started = time.perf_counter_ns()
            os.write(child.fd, b":\n")
            while b"\1" not in os.read(child.fd, 4096):
                pass
            print(time.perf_counter_ns() - started)
    finally:
        child.terminate(force=True)


if __name__ == "__main__":
    main()
