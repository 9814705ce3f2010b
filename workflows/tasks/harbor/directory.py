"""One task's directory on the shared filesystem: its parts, the row that stands for it, the files to lay down."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workflows.errors import TaskDataError
from workflows.tasks.harbor.dockerfile import Build, Copy, DockerfileError, read
from workflows.tasks.harbor.settings import Settings, SettingsError, inside, settings

DEFAULT_WORKDIR: Final = "/app"
VERSION: Final = 2
"""Of how an environment is made: a change makes every layer anew."""
_DEEPEST: Final = 4
_MOST_BYTES: Final = 256 << 20
_CANARY: Final = re.compile(r"\s*(?:<!--.*canary.*-->|#.*canary.*)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Files:
    """Files by their absolute paths in the sandbox: content and mode."""

    entries: tuple[tuple[str, Path, int], ...]

    def read(self) -> Iterator[tuple[str, bytes, int]]:
        """Path, content and mode of each."""
        for target, source, mode in self.entries:
            yield target, source.read_bytes(), mode


@dataclass(frozen=True)
class Directory:
    """A task's directory, read and checked.

    Args:
        path: of the directory.
        instruction: what the agent reads.
        settings: of its task.toml.
        build: of its Dockerfile; None where the image is built already.
    """

    path: Path
    instruction: str
    settings: Settings
    build: Build | None

    @property
    def image(self) -> str:
        """Name of the image as the task gives it."""
        if self.settings.image is not None:
            return self.settings.image
        assert self.build is not None
        return self.build.image

    @property
    def workdir(self) -> str:
        """Where agent, tests and solution begin."""
        built = self.build.workdir if self.build is not None else None
        return self.settings.workdir or built or DEFAULT_WORKDIR

    @property
    def env(self) -> dict[str, str]:
        """Variables of everything in the sandbox, beside the image's own."""
        return {**(self.build.env if self.build is not None else {}), **self.settings.environment}

    @property
    def workspace(self) -> tuple[str, ...]:
        """What of an agent's changes the tests see; a file stands for its directory."""
        given = [posixpath.dirname(one) if posixpath.splitext(one)[1] else one for one in self.settings.artifacts]
        paths = given if self.settings.separate else [self.workdir, *given]
        kept: list[str] = []
        for one in sorted(set(paths)):
            if not any(one == have or one.startswith(f"{have.rstrip('/')}/") for have in kept):
                kept.append(one)
        return tuple(kept)

    @property
    def grading(self) -> str:
        """`trusted` where the tests see declared paths alone and, as the author states, never run what is there.

        A file for which its whole directory is taken, the tests' working directory and their home are no such paths:
        programs find modules and settings there by themselves.
        """
        stands_for_more = any(posixpath.splitext(one)[1] for one in self.settings.artifacts)
        runs_there = any(
            place == one or place.startswith(f"{one.rstrip('/')}/")
            for one in self.workspace
            for place in (self.workdir, "/root")
        )
        trusted = self.settings.separate and self.settings.data_alone and not stands_for_more and not runs_there
        return "trusted" if trusted else "untrusted"

    def part(self, name: str, target: str) -> Files:
        """The files of `tests` or `solution`, below a directory of the sandbox.

        Raises:
            TaskDataError: a link leads out, or they are too large.
        """
        return Files(tuple(_files(self.path / name, target)))

    def copied(self, copy: Copy) -> Files:
        """The files of a COPY.

        Raises:
            TaskDataError: they are not there, or lead out.
        """
        base = self.path / "environment"
        entries: list[tuple[str, Path, int]] = []
        for source in copy.sources:
            found = (
                sorted(base.glob(source.lstrip("/"))) if re.search(r"[*?\[]", source) else [base / source.lstrip("/")]
            )
            if not found or not all(one.exists() and _below(base, one) for one in found):
                raise TaskDataError(f"{base}/Dockerfile:{copy.line}: {source} is not there, or leads out")
            for one in found:
                if one.is_dir():
                    entries += _files(one, copy.target)
                else:
                    target = (
                        posixpath.join(copy.target, one.name) if copy.is_directory or len(found) > 1 else copy.target
                    )
                    entries.append((target, one, _mode(one)))
        return Files(tuple((path, one, copy.mode or mode) for path, one, mode in entries))

    def setup_key(self, image: str) -> str:
        """Names the environment: the image, the Dockerfile and the files that it copies; no test and no solution."""
        parts = [VERSION, image, self.workdir, sorted(self.env.items()), self.build is not None]
        digest = hashlib.sha256(json.dumps(parts).encode())
        if self.build is not None:
            digest.update(_digest(self.path / "environment").encode())
        return "harbor-" + digest.hexdigest()[:40]

    def digest(self) -> str:
        """sha256 of everything in the directory."""
        return _digest(self.path)


def find(path: Path) -> list[Path]:
    """The task directories at or below a path, sorted; hidden ones are passed over.

    Raises:
        TaskDataError: it is no directory, or holds no task.
    """
    if not path.is_dir():
        raise TaskDataError(f"task.path: {path}: expected a directory of tasks, each with a task.toml")
    found = [path] if (path / "task.toml").is_file() else sorted(_below_tasks(path, 1))
    if not found:
        raise TaskDataError(f"task.path: {path}: no directory in it has a task.toml")
    return found


def _below_tasks(path: Path, depth: int) -> Iterator[Path]:
    for child in path.iterdir():
        if child.name.startswith(".") or child.is_symlink() or not child.is_dir():
            continue
        if (child / "task.toml").is_file():
            yield child
        elif depth < _DEEPEST:
            yield from _below_tasks(child, depth + 1)


def opened(path: Path) -> Directory:
    """Read a task's directory.

    Raises:
        TaskDataError: something is missing, or asks for what is not supported; one line that names it.
    """
    try:
        with (path / "task.toml").open("rb") as file:
            found = settings(tomllib.load(file))
        instruction = (path / "instruction.md").read_text(encoding="utf-8")
        build = _build(path, found)
        here = Directory(path, _without_canary(instruction), found, build)
        inside(here.workdir, "WORKDIR")
    except (SettingsError, tomllib.TOMLDecodeError) as error:
        raise TaskDataError(f"{path}/task.toml: {error}") from error
    except DockerfileError as error:
        raise TaskDataError(f"{path}/environment/Dockerfile: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskDataError(f"{path}: cannot be read: {error}") from error
    if not (path / "tests" / "test.sh").is_file():
        raise TaskDataError(f"{path}/tests/test.sh is missing")
    if (path / "tests" / "Dockerfile").exists():
        raise TaskDataError(f"{path}/tests/Dockerfile: an image of the verifier's own is not supported")
    return here


def _build(path: Path, found: Settings) -> Build | None:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (path / "environment" / name).exists():
            raise TaskDataError(f"{path}/environment/{name}: several containers are not supported")
    if found.image is not None:
        return None
    file = path / "environment" / "Dockerfile"
    if not file.is_file():
        raise TaskDataError(f"{path}: neither environment/Dockerfile nor environment.docker_image in task.toml")
    return read(file.read_text(encoding="utf-8"))


def row_of(root: Path, path: Path) -> dict[str, Any]:
    """The columns that stand for a task; tests and solution are not among them.

    Raises:
        TaskDataError: see `opened`.
    """
    here = opened(path)
    return {
        "task_id": path.name if path == root else path.relative_to(root).as_posix(), "instruction": here.instruction,
        "image": here.image, "workdir": here.workdir, "env": here.env, "workspace": list(here.workspace),
        "setup_key": here.setup_key(here.image), "digest": here.digest(),
    }  # fmt: skip


def directory_of(root: Path, row: Mapping[str, Any]) -> Directory:
    """The directory that a row stands for, unchanged since the row was made.

    Raises:
        TaskDataError: it is not there any more, or another.
    """
    task_id = str(row["task_id"])
    path = root if (root / "task.toml").is_file() else root / task_id
    if not _below(root, path) or not (path / "task.toml").is_file():
        raise TaskDataError(f"{task_id}: no such task in {root}")
    here = opened(path)
    if row.get("digest") != here.digest():
        raise TaskDataError(f"{path} has changed since the run began: start another run for it")
    return here


def _files(base: Path, target: str) -> Iterator[tuple[str, Path, int]]:
    size = 0
    for directory, names, files in os.walk(base):
        names.sort()
        for name in sorted(files):
            path = Path(directory) / name
            if not _below(base, path) or not path.is_file():
                raise TaskDataError(f"{path}: neither a file nor a link to one of {base}")
            size += path.stat().st_size
            if size > _MOST_BYTES:
                raise TaskDataError(f"{base} holds more than {_MOST_BYTES >> 20} MiB: put it into an image")
            yield posixpath.join(target, path.relative_to(base).as_posix()), path, _mode(path)


def _mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def _below(base: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(base.resolve())


def _digest(base: Path) -> str:
    digest = hashlib.sha256()
    for target, path, mode in sorted(_files(base, "")):
        digest.update(f"{target}\0{mode}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _without_canary(text: str) -> str:
    lines = text.splitlines()
    while lines and (not lines[0].strip() or _CANARY.match(lines[0])):
        lines.pop(0)
    return "\n".join(lines).strip()
