"""`python -P -m tests`: every tier, in two lanes of pytest side by side, for most of a cluster's time is waiting."""

from __future__ import annotations

import asyncio
import sys
from time import monotonic

ELSEWHERE = ("tests/integration/test_mutants.py", "tests/integration/grading")
"""Taken out of their tier's lane, so that the lanes last about equally long."""
LANES = {
    "slurm+unit": ("tests/slurm", "tests/unit", *ELSEWHERE),
    "e2e+integration": ("tests/e2e", "tests/integration", *(f"--ignore={path}" for path in ELSEWHERE)),
}
"""What runs one after the other; each lane has at most one busy process at most times."""
NOTHING_WRONG = 0
_TOLD_AGAIN = ("FAILED ", "ERROR ")


async def lane(name: str, paths: tuple[str, ...], options: list[str]) -> tuple[int, list[str]]:
    """Run one lane, its lines shown as they come; give its exit code and the lines that name failures."""
    began, told = monotonic(), list[str]()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "pytest", "--durations=25", *options, *paths,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, limit=1 << 24,
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


async def main(options: list[str]) -> int:
    """Run the lanes side by side; the last lines are the failures of both, and 1 is returned if there is any."""
    ended = await asyncio.gather(*(lane(name, paths, options) for name, paths in LANES.items()))
    for _, told in ended:
        print(*told, sep="\n", end="\n" if told else "", flush=True)
    return 0 if all(code == 0 for code, _ in ended) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(sys.argv[1:])))
