"""Runs a program on inputs, each time within bounds, and reports what it printed. Sent into sandboxes as text.

What it should have printed is not here, and so not in the sandbox: the worker compares. Runs on
Python 3.8 with the standard library and `bounds`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

from workflows.grading import bounds

_PROGRAM = """
import runpy, sys
path, workspace = sys.argv[1:3]
sys.argv = ["solution.py"]
sys.path.append(workspace)
runpy.run_path(path, run_name="__main__")
"""
_LINGERING_S = 0.2
"""How long output is read that a process left behind may still write."""


def main(given: dict[str, Any], tell: Callable[[Any], None]) -> None:
    """Tell `{"started"}`, then for each input `{"status", "output", "cpu_s"}`, up to the first that takes too long.

    The status is `ok`, `time`, `output` (more than is taken) or `exit` (another exit code than 0); the output is
    compressed by zlib, in base64.

    Args:
        given: `solution` (its text), `inputs` (texts), `most` (bytes taken of each output), `time_s` (CPU seconds an
            input), `limits`, `env`, `workspace`.
        tell: reports a record.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8", errors="surrogatepass") as file:
        file.write(given["solution"])
        file.flush()
        tell({"started": True})
        for text, most in zip(given["inputs"], given["most"]):  # noqa: B905 - strict is newer than Python 3.8
            told = run(file.name, text, most, given)
            tell(told)
            if told["status"] == "time":
                return


def run(path: str, text: str, most: int, given: dict[str, Any]) -> dict[str, Any]:
    """One run of the program; see `main`."""
    with tempfile.TemporaryFile() as source:
        source.write(text.encode("utf-8", "surrogatepass"))
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _PROGRAM, path, given["workspace"]], stdin=source,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=given["workspace"], env=given["env"],
            start_new_session=True, preexec_fn=lambda: bounds.limit(given["limits"]),
        )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)
        deadline = time.monotonic() + bounds.wall_s(given["time_s"])
        output, code, used = _followed(process, pipe.fileno(), most, deadline)
    status = "ok" if code == 0 else "exit"
    if code is None or used > given["time_s"]:
        status = "time"
    elif len(output) > most:
        status = "output"
    packed = base64.b64encode(zlib.compress(output[:most], 1)).decode()
    return {"status": status, "output": packed, "cpu_s": round(used, 3)}


def _followed(process: Any, pipe: int, most: int, deadline: float) -> tuple[bytes, Any, float]:
    """Output, exit code (None where its time ran out) and CPU seconds; it has ended then, and its group too."""
    parts, size, code, used = [], 0, None, 0.0
    opened = True
    while code is None or opened:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        ready = select.select([pipe] if opened else [], [], [], min(left, 0.02))[0]
        if ready:
            data = os.read(pipe, 65536)
            opened = bool(data)
            size += len(data)
            if size <= most + 65536:
                parts.append(data)
            if size > most:
                break
        if code is None:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                code = _code(status)
                used = usage.ru_utime + usage.ru_stime
                deadline = min(deadline, time.monotonic() + _LINGERING_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    if code is None:
        _, status, usage = os.wait4(process.pid, 0)
        used = usage.ru_utime + usage.ru_stime
        code = 0 if size > most else None
    process.returncode = 0  # it has been waited for here
    return b"".join(parts), code, used


def _code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
