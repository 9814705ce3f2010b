"""task=harbor: directories in the public Harbor format; tests/test.sh says in a file what an agent's work is worth."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import posixpath
import secrets
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from sandbox.bashtext import BASE_ENV
from sandbox.errors import FilesError, SandboxError
from sandbox.protocols import Sandbox
from stages.errors import RolloutError, VerifierError
from stages.protocols import Environment, Reward, Row
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.tasks.harbor.canaries import canaries
from workflows.tasks.harbor.directory import Directory, Files, directory_of, find, row_of
from workflows.tasks.harbor.dockerfile import Copy
from workflows.tasks.harbor.settings import RESERVED
from workflows.tasks.rows import BROKEN, broken_environment, check_limit, refuse_broken
from workflows.tools import bash

ENV_FILE: Final = "/etc/task-environment"
"""Where the sandbox has the task's variables, for shells that want them."""
REWARDS: Final = "/logs/verifier"
PROTECTED: Final = (
    "conftest.py", "pytest.ini", ".pytest.ini", "__pycache__", "*.pyc", "*.pth", "sitecustomize.py", "usercustomize.py",
    ".pytest_cache", *(f"{one}" for one in RESERVED), *(f"{one}/*" for one in RESERVED), ENV_FILE,
)  # fmt: skip
"""Names that EVAL takes from the layer at any depth: what would act in the tests' own processes."""
_LARGEST_REWARD: Final = 64 * 1024
_MOST: Final = 1.0
_SHELL_S: Final = 60.0
_CLEAR: Final = "chmod -R u+rwx /logs /tests 2>/dev/null; rm -rf /tests /logs; mkdir -p /logs/verifier /logs/agent"
_JUDGE: Final = """
"$@" </dev/null; code=$?
[ -w /logs/verifier ] && [ ! -L /logs/verifier ] && [ ! -L /logs ] || exit 99
for one in reward.txt reward.json; do
  if [ -e "/logs/verifier/$one" ] || [ -L "/logs/verifier/$one" ]; then
    [ -f "/logs/verifier/$one" ] && [ ! -L "/logs/verifier/$one" ] && [ -w "/logs/verifier/$one" ] || exit 99
  fi
done
[ "$code" -gt 128 ] && exit 98
exit 0
"""
"""Runs the tests, and looks whether the files that they wrote could be written.

By 98 it says that the tests were killed, by 99 that somebody made the reward unwritable for them.
"""
_KILLED: Final = 98
_UNWRITABLE: Final = 99
_PROMPT: Final = "\n\nYou have a shell; you work in {workdir}. There is no network."


class HarborTask:
    """Task directories: task.toml, instruction.md, environment/, tests/test.sh, solution/.

    The image is `environment.docker_image` or what the Dockerfile is FROM, by its name in the store; the Dockerfile's
    COPY, ENV, WORKDIR and RUN (without a network) are followed once, in INIT. The tests run in a fresh sandbox that
    has of the agent's work the workspace alone: `artifacts` where `verifier.environment_mode` is separate, else the
    working directory and `artifacts`. The reward is what they write to /logs/verifier/reward.txt or reward.json.

    Args:
        path: a task's directory, or one of many.
        limit: number of rows; None is all.
        image: used in place of what the tasks name; None takes theirs.
        verify_s: most seconds of a run of the tests, whatever a task.toml says; there may be two, which budget.eval_s
            must hold: a run that is cut off by verify_s scores 0, one that the budget cuts off is tried again.

    Raises:
        TaskDataError: an option is out of range.
    """

    name = "harbor"
    private: frozenset[str] = frozenset()
    """Tests and solution are in no row: EVAL and the oracle read them where they lie."""

    def __init__(
        self, path: str | None = None, limit: int | None = None, image: str | None = None, verify_s: float = 240.0
    ) -> None:
        if path is None:
            raise TaskDataError("task.path: task=harbor needs a directory of tasks, each with a task.toml")
        check_limit(limit)
        if not verify_s > 0:
            raise TaskDataError(f"task.options.verify_s: got {verify_s}; allowed: above 0")
        self._root, self._limit, self._image, self._verify_s = Path(path), limit, image, verify_s

    def rows(self) -> Iterable[Row]:
        """A row a directory, by name; one that cannot be used becomes a row that fails alone.

        Raises:
            TaskDataError: there is no task at all.
        """
        for path in itertools.islice(find(self._root), self._limit):
            try:
                yield row_of(self._root, path)
            except (TaskDataError, OSError) as error:
                yield {"task_id": path.relative_to(self._root).as_posix(), BROKEN: str(error)}

    def environment(self, row: Row) -> Environment:
        """The task's image, and what its Dockerfile adds."""
        broken = broken_environment(row)
        if broken is not None:
            return broken
        image = self._image or row["image"]
        return Environment(
            image=image, setup_key=f"{row['setup_key']}-{image}", workspace=tuple(row["workspace"]), protected=PROTECTED
        )

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        """Follow the Dockerfile.

        Raises:
            RolloutError: final; the row is broken, or a step fails.
        """
        refuse_broken(row)
        await _own_root(sandbox)
        try:
            here = await asyncio.to_thread(directory_of, self._root, row)
            made = " ".join(shlex.quote(one) for one in (here.workdir, *(here.build.directories if here.build else ())))
            await self._run(sandbox, f"mkdir -p {made}", "WORKDIR", _SHELL_S)
            lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(here.env.items()))
            await sandbox.files.write(ENV_FILE, lines)
            for step in here.build.steps if here.build is not None else ():
                if isinstance(step, Copy):
                    await _lay(sandbox, await asyncio.to_thread(here.copied, step))
                    continue
                variables = "".join(f"export {name}={shlex.quote(value)}; " for name, value in step.env)
                what = f"{here.path}/environment/Dockerfile:{step.line}: RUN"
                script = f"cd {shlex.quote(step.directory)} && {variables}{step.command}"
                await self._run(sandbox, f"/bin/sh -c {shlex.quote(script)}", what, here.settings.build_s)
        except TaskDataError as error:
            raise RolloutError(str(error), final=True) from error

    async def _run(self, sandbox: Sandbox, command: str, what: str, timeout_s: float) -> None:
        result = await sandbox.shell.run(command, timeout_s=timeout_s)
        if result.timed_out or result.exit_code != 0:
            how = f"took over {timeout_s:g} s" if result.timed_out else f"gave exit code {result.exit_code}"
            said = " ".join(result.output.split())[-300:]
            raise TaskDataError(
                f"{what} {how}: {said} (INIT has no network: import an image where this is done, and name it in "
                "environment.docker_image)"
            )

    def prompt(self, row: Row) -> list[Message]:
        """The instruction, and where the agent is."""
        more = f" `. {ENV_FILE}` sets the task's variables." if row["env"] else ""
        return [Message("user", row["instruction"] + _PROMPT.format(workdir=row["workdir"]) + more)]

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """The bash tool."""
        return [bash.SCHEMA]

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """Run tests/test.sh alone, and read what it wrote; what it pays is held against tests that must fail.

        A reward that the tests did not write, or somebody made unwritable, is 0.0: so is what an agent does to them.

        Raises:
            VerifierError: final; the directory is not what it was.
            SandboxError: the tests could not be laid down or started.
        """
        try:
            here = await asyncio.to_thread(directory_of, self._root, row)
            tests = await asyncio.to_thread(here.part, "tests", "/tests")
        except TaskDataError as error:
            raise VerifierError(str(error), final=True) from error
        files = {path: (content, mode) for path, content, mode in await asyncio.to_thread(lambda: list(tests.read()))}
        value, parts = await self._judged(sandbox, here, files)
        parts = {"canary": 1.0, **parts}
        false = canaries(files["/tests/test.sh"][0].decode("utf-8", "replace"), {one: files[one][0] for one in files})
        if value > 0.0 and false:
            await sandbox.reset()
            changed = {path: (false.get(path, content), mode) for path, (content, mode) in files.items()}
            if (await self._judged(sandbox, here, changed))[0] >= value:
                value, parts = 0.0, {**parts, "canary": 0.0}
        return Reward(value, parts, "trusted" if here.grading == "trusted" else "untrusted")

    async def _judged(
        self, sandbox: Sandbox, here: Directory, files: Mapping[str, tuple[bytes, int]]
    ) -> tuple[float, dict[str, float]]:
        """Reward and parts of one run of the tests."""
        await _own_root(sandbox)
        variables = await _variables(sandbox)
        await _execute(sandbox, ("/bin/sh", "-c", _CLEAR), BASE_ENV)
        for path, (content, mode) in files.items():
            await sandbox.files.write(path, content, mode=mode)
        done = await sandbox.execute(
            ("/bin/bash", "-c", _JUDGE, "judge", "/bin/bash", "/tests/test.sh"), cwd=here.workdir,
            env={**variables, **here.env, **here.settings.verifier},
            timeout_s=min(self._verify_s, here.settings.verifier_s),
        )  # fmt: skip
        if done.exit_code == _UNWRITABLE:
            return 0.0, {"format": 0.0, "canary": 0.0}
        rewards = None if done.timed_out or done.exit_code == _KILLED else await _rewards(sandbox)
        return (0.0, {"format": 0.0}) if rewards is None else (rewards[0], {**rewards[1], "format": 1.0})

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """Run solution/solve.sh.

        Raises:
            TaskDataError: there is none, or it fails.
        """
        here = await asyncio.to_thread(directory_of, self._root, row)
        if not (here.path / "solution" / "solve.sh").is_file():
            raise TaskDataError(f"{here.path}/solution/solve.sh is missing: this task has no way of its author's")
        await _own_root(sandbox)
        await _lay(sandbox, await asyncio.to_thread(here.part, "solution", "/solution"))
        variables = {**here.env, **here.settings.solution}
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())
        script = f"cd {shlex.quote(here.workdir)} && {exports}bash /solution/solve.sh"
        result = await sandbox.shell.run(f"bash -c {shlex.quote(script)}", timeout_s=here.settings.agent_s)
        if result.exit_code != 0:
            raise TaskDataError(
                f"{here.path}/solution/solve.sh gave {result.exit_code}: {result.output.strip()[-300:]}"
            )
        return "Done."


async def _own_root(sandbox: Sandbox) -> None:
    """See that the sandbox has a root of its own: what is done to /tests and /logs would be done to this machine's.

    Raises:
        RolloutError: it has none; final.
    """
    path = f"/tmp/.rollmill-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox
    await sandbox.files.write(path, "")
    seen = await sandbox.shell.run(f"[ -e {path} ]", timeout_s=_SHELL_S)
    await sandbox.files.remove(path)
    if seen.exit_code != 0:
        raise RolloutError(
            "task=harbor writes to /tests, /logs and directories of the image: take a sandbox with a root of its own "
            "(sandbox=bubblewrap or apptainer), sandbox=none has this machine's",
            final=True,
        )


async def _variables(sandbox: Sandbox) -> dict[str, str]:
    """What the image sets, as the sandbox's shell has it: told by the shell itself, which runs nothing else.

    Raises:
        SandboxError: it does not tell.
    """
    told = await sandbox.shell.run("declare -px", timeout_s=_SHELL_S)
    found = dict(BASE_ENV)
    for word in shlex.split(told.output.replace("declare -x ", "\n"), comments=False):
        name, equals, value = word.partition("=")
        if equals and name.isidentifier() and not name.startswith("__"):
            found[name] = value.replace("\\$", "$").replace("\\`", "`")  # as bash quotes them between double quotes
    for name in ("PWD", "OLDPWD", "SHLVL", "_"):
        found.pop(name, None)
    return found


async def _execute(sandbox: Sandbox, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    done = await sandbox.execute(argv, env=env, timeout_s=_SHELL_S)
    if done.exit_code != 0:
        said = done.output.decode("utf-8", "replace").strip()[-300:]
        raise SandboxError(
            f"/tests and /logs cannot be made anew: exit code {done.exit_code}: {said}", boundary="files"
        )


async def _lay(sandbox: Sandbox, files: Files) -> None:
    for path, content, mode in await asyncio.to_thread(lambda: list(files.read())):
        await sandbox.files.write(path, content, mode=mode)


async def _rewards(sandbox: Sandbox) -> tuple[float, dict[str, float]] | None:
    """What the tests wrote: the reward, and its parts; None where they wrote nothing that can be read.

    Where both files are there, the smaller reward counts; 1 is the most, and -1 the least. An agent's code may have
    written them, so nothing in them is a fault of the task: to be masked would be better for it than 0.
    """
    found: list[tuple[float, dict[str, float]]] = []
    for name in ("reward.txt", "reward.json"):
        try:
            text = await sandbox.files.read_text(posixpath.join(REWARDS, name), limit_bytes=_LARGEST_REWARD)
        except FilesError:
            continue
        read = _text_reward(text) if name == "reward.txt" else _json_reward(text)
        if read is None:
            return None
        found.append(read)
    return min(found, key=lambda one: one[0], default=None)


def _text_reward(text: str) -> tuple[float, dict[str, float]] | None:
    try:
        value = float(text.strip())
    except ValueError:
        return None
    return (_bounded(value), {}) if math.isfinite(value) else None


def _json_reward(text: str) -> tuple[float, dict[str, float]] | None:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        told = {"reward": told}
    try:
        parts = {
            name: float(value)
            for name, value in told.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
    except OverflowError:  # a whole number of hundreds of digits
        return None
    if len(parts) != len(told) or not parts:
        return None
    if "reward" in parts:
        return _bounded(parts.pop("reward")), parts
    return (_bounded(next(iter(parts.values()))), {}) if len(parts) == 1 else None


def _bounded(value: float) -> float:
    return max(-_MOST, min(value, _MOST))
