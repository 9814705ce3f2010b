"""task=swe by images of published data sets: the repository lies in the image, its runner's log says what passed."""

from __future__ import annotations

import asyncio
import itertools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from sandbox.protocols import Sandbox
from stages.errors import RolloutError, VerifierError
from stages.protocols import Environment, Reward, Row
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.grading.logs import PARSERS
from workflows.tasks.rows import broken_environment, check_limit, check_positive, read_rows, refuse_broken
from workflows.tasks.swe import published
from workflows.tasks.swe.grading import PROTECTED
from workflows.tools import bash

_PROMPT: Final = """You are working in {root}, a git repository of {repo}. This issue was reported:

<issue>
{issue}
</issue>

Change the source in {root} so that the issue is resolved; tests that you do not see will check it. There is no
network. When you are done, say so."""
_PRIVATE: Final = frozenset(
    {"patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "hints_text", "expected_output_json"}
)
_PUBLIC: Final = frozenset(
    {"instance_id", "repo", "repo_name", "base_commit", "problem_statement", "version", "docker_image"}
)
_LOG_BYTES: Final = 16 << 20
_ENV: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_ONE_COMMIT: Final = """cd {root} && tag=$(git describe --tags --abbrev=0 2>/dev/null)
list=$(mktemp) && git ls-files -s -z | grep -zv '^160000' | cut -z -f 2- > "$list" &&
rm -rf .git && git init -q && git config user.name rollmill && git config user.email rollmill@localhost &&
git commit -q --allow-empty -m history && {{ [ -z "$tag" ] || git tag "$tag"; }} &&
git update-index --add --remove -z --stdin < "$list" && git commit -q -m base && rm "$list"
"""
"""What the repository will be is not in it any more, nor what it was; versions that count from a tag still have one."""
_APPLY: Final = "cd {root} && git apply --whitespace=nowarn -v - "


class ImagedSweTask:
    """Rows of SWE-bench (Verified, Lite, full), SWE-Gym or R2E-Gym, each in the image that was published for it.

    The images are in the store by their registry's names (docs/images.md). The tests are run by the repository's own
    runner, and what it prints is read: the rows say `grading: untrusted`. Of the agent's work EVAL takes what lies in
    the repository, but for names that tests and runners are steered by.

    Args:
        path: JSONL or Parquet with the data set's columns.
        limit: number of rows; None is all.
        columns: swe-bench, swe-gym or r2e-gym.
        image: used in place of the row's; None takes the row's.
        test_s: deadline of the tests, seconds, which scores 0; below budget.eval_s, after which they are tried again.
        root: where the repository lies in the image.

    Raises:
        TaskDataError: an option is out of range.
    """

    name = "swe"
    private = _PRIVATE

    def __init__(
        self,
        path: str | None = None,
        limit: int | None = None,
        columns: str = "swe-bench",
        image: str | None = None,
        test_s: float = 500.0,
        root: str = published.ROOT,
    ) -> None:
        if path is None:
            raise TaskDataError("task.path: a JSONL or Parquet file with the columns of SWE-bench, SWE-Gym or R2E-Gym")
        if columns not in published.NAMES:
            raise TaskDataError(f"task.options.columns: got {columns!r}; allowed: {', '.join(published.NAMES)}")
        check_limit(limit)
        check_positive(test_s=test_s)
        self._path, self._limit, self._columns = Path(path), limit, columns
        self._image, self._test_s, self._root = image, test_s, root

    def rows(self) -> Iterable[Row]:
        """The rows in order; a line that is no row becomes one that fails alone.

        Raises:
            TaskDataError: `path` cannot be read.
        """
        return itertools.islice(read_rows(self._path, self._checked), self._limit)

    def _checked(self, row: Any, number: int) -> dict[str, Any] | str:
        wrong = published.wrong(self._columns, row)
        if wrong:
            return wrong
        known = {name: value for name, value in row.items() if name in _PUBLIC or name in _PRIVATE}
        return {**known, "task_id": row.get("instance_id") or f"{self._columns}-{number}"}

    def environment(self, row: Row) -> Environment:
        """The row's image, prepared."""
        broken = broken_environment(row)
        if broken is not None:
            return broken
        image = self._image or self._image_of(row)
        more = published.R2E_PROTECTED if self._columns == "r2e-gym" else ()
        return Environment(
            image=image, setup_key=f"swe-imaged-3-{self._columns}-{image}", workspace=(self._root,),
            protected=(*PROTECTED, *more),
        )  # fmt: skip

    def _image_of(self, row: Row) -> str:
        if self._columns == "r2e-gym":
            return str(row["docker_image"])
        return published.image(self._columns, row["instance_id"])

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        """Make the repository one of a single commit: images may hold the fix in objects and tags of later ones.

        R2E-Gym's tests are moved to where its own harness has them.

        Raises:
            RolloutError: final; the row is broken, or the image is another.
        """
        refuse_broken(row)
        result = await sandbox.shell.run(f"git -C {shlex.quote(self._root)} rev-parse HEAD", timeout_s=60.0)
        if result.exit_code != 0:
            image = self.environment(row).image
            raise RolloutError(f"{row['task_id']}: image {image} has no git repository in {self._root}", final=True)
        if self._columns == "r2e-gym":
            moved = await sandbox.shell.run(f"({published.r2e_moved(self._root)})", timeout_s=300.0)
            if moved.exit_code != 0:
                raise RolloutError(
                    f"{row['task_id']}: image {row['docker_image']} holds no run_tests.sh, or no r2e_tests", final=True
                )
        made = await sandbox.shell.run(f"({_ONE_COMMIT.format(root=shlex.quote(self._root))})", timeout_s=300.0)
        if made.exit_code != 0:
            said = " ".join(made.output.split())[-300:]
            raise RolloutError(f"{row['task_id']}: its repository cannot be committed anew: {said}", final=True)

    def prompt(self, row: Row) -> list[Message]:
        """The issue and where things are."""
        repo = row.get("repo") or row.get("repo_name") or "a project"
        issue = re.sub(r"\[/?ISSUE\]", "", row["problem_statement"]).strip()
        return [Message("user", _PROMPT.format(root=self._root, repo=repo, issue=issue))]

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """The bash tool."""
        return [bash.SCHEMA]

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """Lay the hidden tests down, run the repository's runner, read its log.

        Raises:
            VerifierError: final; the row is none, or its test patch does not apply to the image's own files.
        """
        wrong = published.wrong(self._columns, row)
        if wrong:
            raise VerifierError(f"{row['task_id']}: {wrong}", final=True)
        told = published.instance(self._columns, row)
        if told.files:
            # The agent's versions go first: a patch of the tests applies to what the commit has.
            restore = (
                f'for one in {shlex.join(told.files)}; do git checkout -q HEAD -- "$one" || rm -rf -- "$one"; done'
            )
            await self._bash(sandbox, f"cd {shlex.quote(self._root)} && {{ {restore}; }} 2>/dev/null", b"")
            applied = await self._bash(sandbox, _APPLY.format(root=shlex.quote(self._root)), row["test_patch"].encode())
            if applied[0] != 0:
                raise VerifierError(
                    f"{row['task_id']}: test_patch does not apply: {applied[1].strip()[-300:]}", final=True
                )
        done = await sandbox.execute(
            ("/bin/bash", "-c", told.command), env=_ENV, cwd=self._root, timeout_s=self._test_s, output_bytes=_LOG_BYTES
        )
        log = done.output.decode("utf-8", "replace")
        found = await asyncio.to_thread(PARSERS[told.parser], log)
        share = published.agreement(told.expected, found)
        parts = {"passed": share, "format": float(bool(found) and not done.timed_out)}
        return Reward(float(share == 1.0 and not done.timed_out), parts, "untrusted")

    async def _bash(self, sandbox: Sandbox, script: str, data: bytes) -> tuple[int, str]:
        done = await sandbox.execute(("/bin/bash", "-c", script), env=_ENV, input=data, timeout_s=120.0)
        return done.exit_code, done.output.decode("utf-8", "replace")

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """Apply the row's patch.

        Raises:
            TaskDataError: the data set has none, or it does not apply.
        """
        if not row.get("patch"):
            raise TaskDataError(f"{row['task_id']}: {self._columns} has no patch in its rows")
        await sandbox.files.write("/tmp/rollmill.patch", row["patch"])  # noqa: S108 - inside the sandbox
        command = _APPLY.format(root=shlex.quote(self._root)) + "< /tmp/rollmill.patch && rm /tmp/rollmill.patch"
        result = await sandbox.shell.run(command, timeout_s=60.0)
        if result.exit_code != 0:
            raise TaskDataError(f"{row['task_id']}: patch does not apply: {result.output.strip()[-300:]}")
        return "Done."
