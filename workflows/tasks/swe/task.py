"""task=swe: a repository with an issue; hidden tests say whether it is mended. SWE-bench's columns."""

from __future__ import annotations

import asyncio
import itertools
import posixpath
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sandbox.errors import FilesError
from sandbox.protocols import Sandbox
from stages.errors import RolloutError, VerifierError
from stages.protocols import Environment, Reward, Row
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.grading.trusted import run_trusted
from workflows.tasks.rows import broken_environment, check_limit, check_positive, read_rows, refuse_broken
from workflows.tasks.swe import archive, columns, grading, patches, repository, setting
from workflows.tools import bash
from workflows.wheels.cache import WheelCache
from workflows.wheels.errors import UnresolvableError, WheelError
from workflows.wheels.fetch import own_environ
from workflows.wheels.install import site_packages

_PROMPT = """You are working in {root}, a git repository of {repo}{version}. This issue was reported:

<issue>
{issue}
</issue>

Change the source in {root} so that the issue is resolved; tests that you do not see will check it. There is no
network. {python} is the project's Python with its requirements, pytest among them. When you are done, say so."""


_CLEAR = """
here="$1"; shift
while [ $# -gt 1 ]; do here="$here/$1"; shift; [ -d "$here" ] || rm -f -- "$here"; done
rm -rf -- "$here/$1"
"""
"""Removes what is no directory above a file, and whatever has its name."""


class SweTask:
    """Rows of SWE-bench's columns, with `archive` (the repository as it was, a tar) and `requirements`.

    Args:
        path: a JSONL file; archives are relative to its directory.
        limit: number of rows; None is all.
        wheels: the directory of the wheel cache; the store's in a run.
        image: of the sandboxes; it holds bash, tar, git and Python.
        python: the image's interpreter.
        test_s: deadline of one run of the hidden tests, seconds; what is not reported by then has not passed.

    Raises:
        TaskDataError: an option is out of range.
    """

    name = "swe"
    private = columns.PRIVATE

    def __init__(
        self,
        path: str | None = None,
        limit: int | None = None,
        wheels: str | None = None,
        image: str = "host",
        python: str = "python3",
        test_s: float = 240.0,
    ) -> None:
        if path is None:
            raise TaskDataError("task.path: task=swe needs a JSONL file with SWE-bench's columns")
        check_limit(limit)
        check_positive(test_s=test_s)
        self._path, self._limit = Path(path), limit
        self._image, self._python, self._test_s = image, python, test_s
        self._cache = WheelCache(Path(wheels or self._path.parent / "wheels"), own_environ())

    def rows(self) -> Iterable[Row]:
        """The rows in order, each with the digest of its archive.

        Raises:
            TaskDataError: `path` cannot be read; a line that is no row becomes a row that fails alone.
        """
        folder = self._path.parent

        def check(line: Any, number: int) -> dict[str, Any] | str:
            del number
            return columns.wrong(line) or columns.completed(line, folder)

        return itertools.islice(read_rows(self._path, check), self._limit)

    def environment(self, row: Row) -> Environment:
        """The row's own repository and requirements; the rollouts of a group share it."""
        broken = broken_environment(row)
        if broken is not None:
            return broken
        row = self._with_digest(row)
        return Environment(
            image=self._image, setup_key=columns.setup_key(row, setting.VERSION, self._python),
            workspace=(setting.ROOT,), protected=grading.PROTECTED,
        )  # fmt: skip

    def _with_digest(self, row: Row) -> Row:
        """A row that a trainer sent itself has no digest yet."""
        if "archive_sha256" in row:
            return row
        return columns.completed({"instance_id": row["task_id"], **row}, self._path.parent)

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        """Fetch outside, install inside.

        Raises:
            RolloutError: final where the row's archive or requirements cannot be used by anybody.
        """
        refuse_broken(row)
        row = self._with_digest(row)
        tree = await asyncio.to_thread(setting.temporary_tree)
        try:
            target = await setting.ask(sandbox, self._python)
            lock = await asyncio.to_thread(self._cache.lock, setting.requirements(row), target)
            tar = await asyncio.to_thread(setting.laid_out, row, target, lock, self._cache, tree)
            await setting.install(sandbox, tar, site_packages(target.version))
        except (TaskDataError, UnresolvableError) as error:
            raise RolloutError(f"{row['task_id']}: {error}", final=True) from error
        except WheelError as error:
            raise RolloutError(f"{row['task_id']}: {error}") from error
        finally:
            await asyncio.to_thread(setting.remove, tree)

    def prompt(self, row: Row) -> list[Message]:
        """The issue and where things are."""
        version = f" {row['version']}" if row.get("version") else ""
        text = _PROMPT.format(
            root=setting.ROOT, repo=row["repo"], version=version, issue=row["problem_statement"].strip(),
            python=setting.PYTHON,
        )  # fmt: skip
        return [Message("user", text)]

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """The bash tool."""
        return [bash.SCHEMA]

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """Run the hidden tests and their canaries on what the agent left.

        Raises:
            VerifierError: the row's tests cannot be run by anybody, or the trusted runner did not start.
        """
        row = self._with_digest(row)
        tests = await asyncio.to_thread(self._tests, row)
        version = await self._version(sandbox)
        runs: list[tuple[grading.Canaries, grading.Heard]] = []
        for canaries in grading.draw(tests):
            if runs:
                await sandbox.reset()  # what the first run changed, the interpreter among it, the second does not see
            await self._lay_down(sandbox, tests)
            graded = await run_trusted(
                sandbox, grading.GUEST, grading.assignment(row, tests, canaries, version),
                interpreters=[setting.PYTHON], env=grading.GUEST_ENV, timeout_s=self._test_s,
            )  # fmt: skip
            heard = await asyncio.to_thread(grading.hear, graded.records, tests)
            if heard.unreadable:
                path, text = next(iter(heard.unreadable.items()))
                raise VerifierError(f"{row['task_id']}: hidden tests {path}: {text}", final=True)
            if heard.changed is None:
                said = graded.execution.output.decode(errors="replace").strip().splitlines()[-1:]
                raise VerifierError(
                    f"{row['task_id']}: pytest did not begin, before any code of the project: {''.join(said)[-300:]}",
                    final=not graded.execution.timed_out,
                )
            runs.append((canaries, heard))
            if graded.execution.timed_out:
                break  # nothing passes any more, whatever the other run says
        return await asyncio.to_thread(grading.judge, tests, runs)

    def _tests(self, row: Row) -> grading.Tests:
        """The hidden files, made from the archive, where no agent ever was."""
        tree = setting.temporary_tree()
        try:
            archive.unpack(Path(row["archive"]), tree, version=row.get("version", ""))

            def read(path: str) -> bytes | None:
                file = tree / path
                inside = file.resolve().is_relative_to(tree.resolve())
                return file.read_bytes() if inside and file.is_file() else None

            return repository.complete(grading.tests_of(row, read), row, tree, read)
        except TaskDataError as error:
            raise VerifierError(f"{row['task_id']}: {error}", final=True) from error
        finally:
            setting.remove(tree)

    async def _version(self, sandbox: Sandbox) -> str:
        """The environment's Python, from the layer."""
        for entry in await sandbox.files.list(f"{setting.ENV}/lib"):
            if entry.name.startswith("python"):
                return entry.name.removeprefix("python")
        raise VerifierError(f"{setting.ENV}/lib holds no Python: the layer is not one of task=swe")

    async def _lay_down(self, sandbox: Sandbox, tests: grading.Tests) -> None:
        """Write the hidden files over whatever has their names; nothing of the agent runs meanwhile."""
        for path, content in tests.files.items():
            full = posixpath.join(setting.ROOT, path)
            if content is None:
                await sandbox.execute(["/bin/rm", "-rf", "--", full], cwd="/", timeout_s=self._test_s)
                continue
            content = tests.decoys.get(path, content)
            try:
                await sandbox.files.write(full, content)
            except FilesError:  # something stands where the file, or a directory above it, must be
                await sandbox.execute(
                    ["/bin/sh", "-c", _CLEAR, "sh", setting.ROOT, *path.split("/")], cwd="/", timeout_s=self._test_s
                )
                await sandbox.files.write(full, content)

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """Apply the row's patch with git, as a person would.

        Raises:
            TaskDataError: it does not apply.
        """
        await sandbox.files.write("/tmp/rollmill.patch", row["patch"])  # noqa: S108 - inside the sandbox
        command = f"cd {setting.ROOT} && git apply --whitespace=nowarn /tmp/rollmill.patch && rm /tmp/rollmill.patch"
        result = await sandbox.shell.run(command, timeout_s=60.0)
        if result.exit_code != 0:
            raise TaskDataError(f"{row['task_id']}: patch does not apply: {result.output.strip()[-300:]}")
        return f"Changed {', '.join(patches.paths(row['patch']))}."
