"""Apptainer definition files as spython parses them, checked; and a build's commands, run within their time.

spython 0.3.14 spoils what it was not made for, which is mended here: names of base images are lowercased, lines of
scripts lose their indentation, a base that is no Docker image is refused. Its way to run
commands is not used: one whose output nobody reads any more would go on, and its environment would stand in a command
line that all users see.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from spython.main.parse.parsers import SingularityParser

from sandbox.errors import ImageError

_HEADER = re.compile(r"^\s*([A-Za-z]+)\s*:\s*(.*?)\s*(?:\s#.*)?$")
_KNOWN = frozenset({"post", "environment", "files", "labels", "help", "runscript", "startscript", "test", "arguments"})
_HEADERS = frozenset({"bootstrap", "from", "stage", "fingerprints", "includecmd", "mirrorurl", "osversion", "include"})
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)")


class Definition(msgspec.Struct, frozen=True):
    """One definition file.

    Args:
        bootstrap: where the base comes from: localimage, docker, ...
        base: what `From:` names, as it stands.
        post: the script that makes the image out of the base; empty where there is none.
        files: (source on this machine, path in the image).
        env: variables of every process in the image.
        test: a script that must succeed in the finished image; empty where there is none.
    """

    bootstrap: str
    base: str
    post: str
    files: list[tuple[str, str]]
    env: dict[str, str]
    test: str = ""


class _Parser(SingularityParser):  # type: ignore[misc]
    """spython's parser, with lines of scripts and names of bases as they stand."""

    def __init__(self, path: str) -> None:
        self.headers: dict[str, str] = {}
        self.sections: dict[str, list[str]] = {}
        super().__init__(path)

    def _check_bootstrap(self, line: str) -> None:
        self._header(line)

    def _load_from(self, line: str) -> None:
        self._header(line)
        self.recipe[self.active_layer].fromHeader = self.headers.get("from", "")

    def _header(self, line: str) -> None:
        found = _HEADER.match(line)
        if found is not None:
            self.headers.setdefault(found[1].lower(), found[2])

    def _setup(self, lines: list[str]) -> None:
        raise ImageError("%setup runs on this machine outside of any sandbox: use %files or %post", boundary="images")

    def _multistage(self, line: str) -> None:
        raise ImageError("builds of several stages are not supported: build the stages as images", boundary="images")

    def _load_section(self, lines: list[str], section: str | None, layer: str | None = None) -> None:
        members: list[str] = []
        while lines and not re.match(r"%[A-Za-z]", lines[0]):
            members.append(lines.pop(0).rstrip("\n"))
        name = section or ""
        if name not in _KNOWN and name != "setup":
            raise ImageError(
                f"%{name} is no section that a build follows ({', '.join(sorted(_KNOWN))})", boundary="images"
            )
        if layer is not None:
            raise ImageError(
                "%files from another stage is not supported: build the stages as images", boundary="images"
            )
        self.sections.setdefault(name, []).extend(members)
        if members and name in ("post", "setup"):
            self._get_mapping(name)(members)


def read_definition(path: Path) -> Definition:
    """Parse a definition file.

    Raises:
        ImageError: it cannot be read, or asks for what no build here does; one line that names the file.
    """
    try:
        path.read_text()  # spython would say of a missing file that, and end the process
        return _definition(_Parser(str(path)))
    except ImageError as error:
        raise ImageError(f"{path}: {error}", boundary="images") from error
    except (OSError, UnicodeDecodeError, SystemExit) as error:
        raise ImageError(f"{path} cannot be read as a definition file: {error}", boundary="images") from error


def header_alone(bootstrap: str, base: str) -> str:
    """A definition of the base and nothing else."""
    return f"Bootstrap: {bootstrap}\nFrom: {base}\n"


def _definition(parser: Any) -> Definition:
    headers = {name: value for name, value in parser.headers.items() if name in _HEADERS}
    if not headers.get("bootstrap") or not headers.get("from"):
        raise ImageError("it has no `Bootstrap:` and `From:` lines", boundary="images")
    return Definition(
        headers["bootstrap"].lower(), headers["from"], _script(parser.sections.get("post", [])),
        [_pair(line) for line in _lines(parser, "files")],
        dict(_variable(line) for line in _lines(parser, "environment")),
        _script(parser.sections.get("test", [])),
    )  # fmt: skip


def _script(lines: list[str]) -> str:
    return "\n".join(lines) + "\n" if any(line.strip() for line in lines) else ""


def _lines(parser: Any, section: str) -> list[str]:
    stripped = (line.strip() for line in parser.sections.get(section, []))
    return [line for line in stripped if line and not line.startswith("#")]


def _pair(line: str) -> tuple[str, str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ImageError(f"%files: {line!r} cannot be read: {error}", boundary="images") from error
    if len(words) not in (1, 2):
        raise ImageError(f"%files: {line!r} is not SOURCE [DESTINATION]", boundary="images")
    target = words[-1] if len(words) == 2 or words[0].startswith("/") else f"/{words[0]}"
    if not target.startswith("/"):
        raise ImageError(f"%files: the destination {target!r} is no absolute path", boundary="images")
    return words[0], target


def _variable(line: str) -> tuple[str, str]:
    """A variable with a plain value; what a shell would have to work out is refused, as no shell reads it later."""
    found = _ASSIGNMENT.fullmatch(line)
    if found is None:
        raise ImageError(f"%environment: {line!r} is no NAME=value", boundary="images")
    try:
        words = shlex.split(found[2])
    except ValueError as error:
        raise ImageError(f"%environment: {line!r} cannot be read: {error}", boundary="images") from error
    if len(words) > 1 or re.search(r"[$`]", found[2]):
        raise ImageError(f"%environment: {line!r} is not a plain value: write it out", boundary="images")
    return found[1], words[0] if words else ""


def driven(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Iterator[str]:
    """Run a build's command, and give what it says line by line as it comes. Blocks.

    Args:
        command: words.
        env: its whole environment.
        timeout_s: wall seconds after which it is killed with its process group, as when nobody reads on.

    Raises:
        ImageError: it failed; its end is the last line that was given.
    """
    deadline = time.monotonic() + timeout_s
    try:
        process = subprocess.Popen(
            list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ImageError(f"{command[0]} cannot be started: {error.strerror}", boundary="images") from error
    assert process.stdout is not None
    with process.stdout as output:
        try:
            yield from _lines_until(output, deadline)
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise ImageError(f"not done within {timeout_s:g} s", boundary="images") from error
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise ImageError(f"ended with {code}", boundary="images")


def _lines_until(output: IO[bytes], deadline: float) -> Iterator[str]:
    """Lines as they come; TimeoutError at the deadline."""
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(output, selectors.EVENT_READ)
        while True:
            if not ready.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            data = os.read(output.fileno(), 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace") + "\n"
            if not data:
                if rest:
                    yield rest.decode("utf-8", "replace")
                return
