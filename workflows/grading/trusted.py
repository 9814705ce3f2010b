"""Runs a trusted program in a sandbox and believes of its report only what carries the key that it was given.

What the sandbox's layers hold is trusted, what lies in its workspace is not. The interpreter is the image's, without
site directories; the program's text comes from here; the key is new for each run. Who reads the report pipe, or
writes to it, can at most keep records from arriving.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import inspect
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from sandbox.protocols import Execution, Sandbox
from stages.errors import VerifierError
from workflows.grading import bootstrap

INTERPRETERS: Final = ("/usr/local/bin/python3", "/usr/bin/python3")
"""Where images have theirs; the first that is there runs."""
ENV: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent"}
_FIND: Final = (
    'text="$1"; shift; for one in "$@"; do if [ -x "$one" ]; then exec "$one" -I -S -B -c "$text"; fi; done; '
    'echo "no Python in this image: looked for $*" >&2; exit 127'
)
_SAID_BYTES: Final = 2000
_LINE: Final = re.compile(rb"^([0-9a-f]{64}) (.*)$", re.MULTILINE)
"""A line that may be a record. It has 66 bytes or more, which bounds the marks that a full pipe makes us compute."""


class Graded(msgspec.Struct, frozen=True):
    """What a trusted program reported, in order, and how it ended.

    Args:
        records: what it told; its last is missing where something kept it from finishing.
        execution: exit code, output, time-out.
    """

    records: tuple[Any, ...]
    execution: Execution


async def run_trusted(
    sandbox: Sandbox,
    modules: Sequence[str],
    given: Mapping[str, Any],
    *,
    paths: Sequence[str] = (),
    interpreters: Sequence[str] = INTERPRETERS,
    env: Mapping[str, str] = ENV,
    cwd: str = "/",
    timeout_s: float,
    report_bytes: int = 8 * 1024 * 1024,
) -> Graded:
    """Run `main(given, tell)` of the last module alone in the sandbox; its way back is `tell(record)`.

    Args:
        sandbox: fresh: of RUN only what the environment declares.
        modules: names of our modules whose texts are sent, each after those that it imports; beside them they import
            the standard library and what is in `paths`.
        given: JSON data; nothing but this process can read it.
        paths: directories of image or layer that are added to the path of modules; none of a workspace.
        interpreters: absolute paths, the first that exists is used.
        env: the whole environment.
        cwd: a directory of the sandbox; modules are not looked for there.
        timeout_s: wall seconds of everything.
        report_bytes: most bytes of its report.

    Raises:
        VerifierError: it did not begin: no code of an agent has run, so nothing is known of it.
        SandboxError: it could not be started, or did not go away.
    """
    key = secrets.token_bytes(32)
    texts = {name: source(name) for name in modules}
    message = {**given, "key": key.hex(), "paths": list(paths), "modules": texts}
    execution = await sandbox.execute(
        ("/bin/sh", "-c", _FIND, "sh", source(bootstrap.__name__), *interpreters),
        input=json.dumps(message).encode(), env=env, cwd=cwd, timeout_s=timeout_s, report_bytes=report_bytes,
    )  # fmt: skip
    records = await asyncio.to_thread(believed, key, execution.report)
    if not records:
        said = execution.output[-_SAID_BYTES:].decode("utf-8", "replace").strip() or "(nothing)"
        how = f"did not begin within {timeout_s:g} s" if execution.timed_out else f"ended with {execution.exit_code}"
        raise VerifierError(f"the grader {how} before it began; it said: {said}")
    return Graded(tuple(records[1:]), execution)


def believed(key: bytes, report: bytes) -> list[Any]:
    """The records of a report in order, up to the first that is missing; lines without the key's mark are none."""
    records: list[Any] = []
    for line in _LINE.finditer(report):
        mark, body = line.groups()
        wanted = hmac.digest(key, b"%d:" % len(records) + body, "sha256").hex().encode()
        if hmac.compare_digest(mark, wanted):
            records.append(json.loads(body))
    return records


def untrusted(modules: Sequence[str]) -> str:
    """The program of a process for code that nobody trusts: `main(given, pipe)` of the last module.

    It expects `take` and `give`, the descriptors of its pipe, and reads `given` as the first message.
    """
    texts = {name: source(name) for name in modules}
    lines = (
        "import json, sys, types", inspect.getsource(bootstrap.load), f"main = load(json.loads({json.dumps(texts)!r}))",
        "pipe = sys.modules['workflows.grading.values'].Pipe(take, give)", "main.main(pipe.receive(), pipe)",
    )  # fmt: skip
    return "from __future__ import annotations\n" + "\n".join(lines)


@cache
def source(module: str) -> str:
    """The text of one of our modules."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
