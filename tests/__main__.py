"""`python -P -m tests`: every tier, in three lanes of pytest side by side, for most of a cluster's time is waiting."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from time import monotonic

CLUSTER = "tests/slurm"
"""A lane of its own: one cluster serves all of its tests, and waits for most of the time."""
PARTS = (
    "tests/e2e", "tests/integration/sandbox/test_ordinary_user.py", "tests/unit", "tests/integration/sandbox",
    "tests/integration", "tests/integration/grading", "tests/e2e/test_chaos.py", "tests/e2e/test_crashes.py",
    "tests/integration/test_mutants.py",
)  # fmt: skip
"""Everything else, about the longest first; a directory is run without those of its parts that are named beside it."""
OTHER_LANES = 2
"""Each takes the next part as soon as it is through with one."""
_TOLD_AGAIN = ("FAILED ", "ERROR ")


def left_out(part: str) -> list[str]:
    """What pytest is told so that a part is run without the other parts below it."""
    return [f"--ignore={other}" for other in PARTS if other.startswith(f"{part}/")]


async def lane(parts: Iterator[str], options: list[str]) -> tuple[list[int], list[str]]:
    """Run parts as long as there are any; give their exit codes and the lines that name failures."""
    codes, told = list[int](), list[str]()
    for part in parts:
        code, lines = await run(part, options)
        codes.append(code)
        told += lines
    return codes, told


async def run(part: str, options: list[str]) -> tuple[int, list[str]]:
    """Run one part, its lines shown as they come; give its exit code and the lines that name failures."""
    began, told, name = monotonic(), list[str](), part.removeprefix("tests/").removesuffix(".py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "pytest", "--durations=15", *options, part, *left_out(part),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, limit=1 << 24, env=_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace").rstrip()
        print(f"{name} | {text}", flush=True)
        if text.startswith(_TOLD_AGAIN):
            told.append(text)
    code = await process.wait()
    print(f"{name} | exit code {code} after {monotonic() - began:.0f} s", flush=True)
    return code, told


def _environment() -> dict[str, str]:
    """Compiled files are kept: else each of thousands of processes compiles all that it imports, for a second."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


async def main(options: list[str]) -> int:
    """Run the lanes side by side; the last lines are the failures of all, and 1 is returned if there is any."""
    queue = iter(PARTS)
    lanes = [iter((CLUSTER,)), *(queue for _ in range(OTHER_LANES))]
    ended = await asyncio.gather(*(lane(parts, options) for parts in lanes))
    for _, told in ended:
        print(*told, sep="\n", end="\n" if told else "", flush=True)
    return 0 if all(code == 0 for codes, _ in ended for code in codes) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(sys.argv[1:])))
