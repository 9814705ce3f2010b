"""The Dockerfiles that can be followed without Docker: one stage on an image of the store, files, commands. Pure.

A command of RUN is run once, in INIT's sandbox, where there is no network: one that needs packages belongs into an
image of the store. The form of the file is of Docker's public reference.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from typing import Final

from sandbox.bashtext import BASE_ENV

_IGNORED: Final = frozenset({"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
"""What says nothing of a file system, or how a container starts that is started another way here."""
_VARIABLE: Final = re.compile(r"\\\$|\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+)|\{)")
_BEGIN: Final = {"PATH": BASE_ENV["PATH"], "HOME": "/root"}
"""What an image is taken to set by itself: the other variables of a base image are not known here."""
_HEREDOC: Final = re.compile(r"<<-?\s*['\"]?(\w+)")


class DockerfileError(ValueError):
    """What cannot be followed; one line that names line and instruction."""


@dataclass(frozen=True)
class Copy:
    """Files of the environment directory that are put into the image; a source is relative to that directory."""

    line: int
    sources: tuple[str, ...]
    target: str
    is_directory: bool
    mode: int | None = None


@dataclass(frozen=True)
class Run:
    """A command for a shell, with the directory and the variables that hold at its place."""

    line: int
    command: str
    directory: str
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Build:
    """A Dockerfile as it is followed.

    Args:
        image: what FROM names.
        steps: in order.
        workdir: at the end; None where there is no WORKDIR.
        env: at the end.
    """

    image: str
    steps: tuple[Copy | Run, ...] = ()
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()


def read(text: str) -> Build:
    """Take a Dockerfile apart.

    Raises:
        DockerfileError: it is none, or asks for what is not followed.
    """
    image, workdir = "", None
    steps: list[Copy | Run] = []
    env: dict[str, str] = {}
    arguments: dict[str, str] = {}
    directories: list[str] = []
    for line, word, rest in _instructions(text):
        values = {**_BEGIN, **arguments, **env}
        if word == "FROM":
            if image:
                raise DockerfileError(f"line {line}: FROM a second time: builds of several stages are not supported")
            image = _from(line, _filled(line, rest, values))
        elif word == "ARG":
            name, _, value = rest.partition("=")
            arguments[name.strip()] = _words(line, value)[0] if value else ""
        elif not image:
            raise DockerfileError(f"line {line}: {word} before FROM")
        elif word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir or "/", _one(line, _filled(line, rest, values))))
            directories.append(workdir)
        elif word == "ENV":
            env.update(_variables(line, _filled(line, rest, values)))
        elif word in ("COPY", "ADD"):
            steps.append(_copy(line, word, _filled(line, rest, values), workdir or "/"))
        elif word == "RUN":
            steps.append(Run(line, _command(line, rest), workdir or "/", tuple({**arguments, **env}.items())))
        elif word == "USER":
            if _one(line, rest) not in ("root", "0", "0:0", "root:root"):
                raise DockerfileError(f"line {line}: USER {rest}: a rootless sandbox has one user, root")
        elif word == "SHELL":
            if _command(line, rest) not in ("/bin/sh -c", "sh -c"):
                raise DockerfileError(f"line {line}: SHELL {rest[:80]}: RUN is followed by /bin/sh alone")
        elif word not in _IGNORED:
            raise DockerfileError(f"line {line}: {word} is not supported")
    if not image:
        raise DockerfileError("it has no FROM")
    return Build(image, tuple(steps), workdir, env, tuple(directories))


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Number, word and rest of each instruction, its continued lines joined."""
    found: list[tuple[int, str, str]] = []
    whole, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") or (not line.strip() and whole):
            if not whole and re.match(r"\s*#\s*escape\s*=\s*`", line):
                raise DockerfileError(f"line {number}: another escape character is not supported")
            continue
        if not whole:
            first = number
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        whole += line
        if whole.strip():
            word, _, rest = whole.strip().partition(" ")
            if word.upper() in ("RUN", "COPY", "ADD") and _HEREDOC.search(rest) and "<<<" not in rest:
                raise DockerfileError(
                    f"line {first}: a here-document is not supported: put the file beside the Dockerfile"
                )
            found.append((first, word.upper(), rest.strip()))
        whole = ""
    if whole.strip():
        raise DockerfileError(f"line {first}: it ends in the middle of an instruction")
    return found


def _from(line: int, rest: str) -> str:
    words = [word for word in rest.split() if not word.startswith("--platform")]
    if len(words) not in (1, 3) or words[0].startswith("--"):
        raise DockerfileError(f"line {line}: FROM {rest}: expected one image")
    if words[0] == "scratch":
        raise DockerfileError(f"line {line}: FROM scratch: there is no shell to run tests with")
    return words[0]


def _filled(line: int, text: str, values: dict[str, str]) -> str:
    def one(found: re.Match[str]) -> str:
        if found[0] == "\\$":
            return "$"
        name = found[1] or found[3]
        if name in values:
            return values[name]
        if found[2] is None:
            raise DockerfileError(f"line {line}: {text[found.start() :][:40]}: neither ARG nor ENV says what this is")
        return found[2]

    return _VARIABLE.sub(one, text)


def _words(line: int, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise DockerfileError(f"line {line}: {text[:80]!r} cannot be read: {error}") from error


def _one(line: int, text: str) -> str:
    words = _words(line, text)
    if len(words) != 1:
        raise DockerfileError(f"line {line}: {text[:80]!r}: expected one word")
    return words[0]


def _variables(line: int, text: str) -> dict[str, str]:
    first = text.split()[0] if text.split() else ""
    if "=" not in first:  # ENV NAME the rest of the line
        name, _, value = text.partition(" ")
        return {name: value.strip()}
    pairs = [word.partition("=") for word in _words(line, text)]
    if not all(name.isidentifier() and equals for name, equals, _ in pairs):
        raise DockerfileError(f"line {line}: ENV {text[:80]}: expected NAME=value")
    return {name: value for name, _, value in pairs}


def _copy(line: int, word: str, rest: str, workdir: str) -> Copy:
    flags = [one for one in rest.split() if one.startswith("--")]
    for flag in flags:
        if not flag.startswith(("--chown=", "--chmod=", "--link")):
            raise DockerfileError(f"line {line}: {word} {flag} is not supported")
    modes = [flag.removeprefix("--chmod=") for flag in flags if flag.startswith("--chmod=")]
    if not all(re.fullmatch("0?[0-7]{3}", one) and int(one, 8) for one in modes):
        raise DockerfileError(f"line {line}: {word} --chmod={modes[-1]}: expected three octal digits")
    plain = " ".join(one for one in rest.split() if not one.startswith("--"))
    try:
        words = json.loads(plain) if plain.startswith("[") else _words(line, plain)
    except ValueError as error:
        raise DockerfileError(f"line {line}: {word} {plain[:80]} cannot be read") from error
    if not isinstance(words, list) or len(words) < 2 or not all(isinstance(one, str) for one in words):
        raise DockerfileError(f"line {line}: {word} needs sources and a destination")
    *sources, target = words
    for source in sources:
        if "://" in source or source.startswith("git@"):
            raise DockerfileError(
                f"line {line}: {word} {source}: there is no network; put the file beside the Dockerfile"
            )
        if word == "ADD" and re.search(r"\.(tar|tgz|tbz2?|txz)(\.\w+)?$", source):
            raise DockerfileError(
                f"line {line}: ADD {source}: archives are not unpacked: put the files themselves there"
            )
    full = posixpath.normpath(posixpath.join(workdir, target))
    is_directory = target.endswith("/") or target in (".", "./") or len(sources) > 1
    return Copy(line, tuple(sources), full, is_directory, int(modes[-1], 8) if modes else None)


def _command(line: int, rest: str) -> str:
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        if not flag.startswith(("--mount=type=cache", "--network=none")):
            raise DockerfileError(f"line {line}: RUN {flag} is not supported")
        rest = rest.lstrip()
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except ValueError:
            return rest
        return shlex.join(words) if all(isinstance(one, str) for one in words) else rest
    return rest
