"""`rollmill images`: brings root file systems into a store, lists and checks them, and fetches tasks' wheels ahead."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import CommandError, Exit
from launch.verbs.arguments import VerbParser

if TYPE_CHECKING:
    from stages.images import ImageStore
    from stages.layout import StoreLayout
    from workflows.wheels.target import PythonTarget

STORE = "runs/store"
"""Where runs that are launched from this directory look, as long as no other store was named."""
_BUILT = ("import", "list", "verify", "prefetch")


def run(name: str, args: Sequence[str]) -> int:
    """Do one of the verb's own commands."""
    chosen = _parse(name, args)
    from sandbox.errors import SandboxError
    from stages.images import ImageStore
    from stages.layout import StoreLayout

    store = _path(chosen.store).absolute()
    try:
        if chosen.command == "prefetch":
            return _prefetch(StoreLayout(store), chosen.names, chosen)
        return _COMMANDS[chosen.command](ImageStore(StoreLayout(store)), chosen.names, chosen)
    except SandboxError as error:
        raise CommandError(str(error)) from error


def _path(text: str) -> Path:
    """A path that may begin with somebody's home."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise CommandError(f"{text}: there is no such home directory: give a path from / or from here") from error


class _Chosen:
    """The arguments."""

    command: str
    names: list[str]
    store: str
    scratch: Path | None
    replace: bool
    image: str


def _parse(name: str, args: Sequence[str]) -> _Chosen:
    parser = VerbParser(
        prog=f"rollmill {name}",
        description="sandbox images: import NAME SOURCE, list, verify [NAME ...], prefetch TASKFILE",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=_BUILT, metavar="COMMAND", help=", ".join(_BUILT))
    parser.add_argument(
        "names", nargs="*", metavar="ARG",
        help="import: NAME and SOURCE, a root file system directory, a tar of one (gzip, bzip2, xz, zstd or plain), a "
        "Docker or OCI archive, an OCI layout or a .sif; verify: names or digests, default all; prefetch: a file of "
        "task=swe, whose wheels are fetched into the store where there is a network",
    )  # fmt: skip
    parser.add_argument("--store", default=STORE, metavar="DIR", help=f"the store; default: {STORE}; store=DIR also")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="local disk for what is unpacked meanwhile")
    parser.add_argument("--image", default="host", help="prefetch: the image whose Python the wheels are for")
    parser.add_argument("--replace", action="store_true", help="import: let a name that is there mean the new content")
    return parser.parse_args(
        [f"--{arg}" if arg.startswith("store=") else arg for arg in args], namespace=_Chosen()
    )  # fmt: skip


def _import(images: ImageStore, names: list[str], chosen: _Chosen) -> int:
    if len(names) != 2:
        raise CommandError("import takes NAME and SOURCE; see rollmill images --help")
    done = images.add(names[0], _path(names[1]), replace=chosen.replace, scratch=chosen.scratch)
    left_out = f", {done.dropped} devices, FIFOs or sockets left out" if done.dropped else ""
    sys.stdout.write(
        f"{done.name.name} {done.name.digest} {done.config.entries} names, {done.config.tar_bytes} bytes, "
        f"{done.config.size_bytes} packed{left_out}\n"
    )
    return Exit.DONE


def _list(images: ImageStore, names: list[str], chosen: _Chosen) -> int:
    del chosen
    if names:
        raise CommandError("list takes no names")
    for record, config in images.names():
        sys.stdout.write(f"{record.name} {record.digest} {config.tar_bytes} bytes, {config.size_bytes} packed\n")
    return Exit.DONE


def _verify(images: ImageStore, names: list[str], chosen: _Chosen) -> int:
    """Every image is read, so that one run names all that are damaged."""
    del chosen
    from sandbox.errors import SandboxError

    for name in names:
        images.digest(name)  # one that is not there stops the verb
    damaged = 0
    for name in names or [record.name for record, _ in images.names()]:
        try:
            sys.stdout.write(f"{name} {images.check(name)} ok\n")
        except SandboxError as error:
            damaged += 1
            sys.stdout.write(f"{name} FAILED: {error}\n")
    return Exit.FAILED if damaged else Exit.DONE


def _prefetch(store: StoreLayout, names: list[str], chosen: _Chosen) -> int:
    """Every row is fetched, so that one run names all that cannot be."""
    if len(names) != 1:
        raise CommandError("prefetch takes one TASKFILE; see rollmill images --help")
    from workflows.errors import WorkflowError
    from workflows.tasks.swe.prefetch import prefetch

    failed = 0
    try:
        target = asyncio.run(_target(store, chosen))
        for row in prefetch(_path(names[0]), store.wheels, target):
            failed += bool(row.error)
            said = f"FAILED: {row.error}" if row.error else f"{row.wheels} wheels"
            sys.stdout.write(f"{row.task_id} {said}\n")
            sys.stdout.flush()
    except WorkflowError as error:
        raise CommandError(str(error)) from error
    return Exit.FAILED if failed else Exit.DONE


async def _target(store: StoreLayout, chosen: _Chosen) -> PythonTarget:
    """The Python that the wheels are for: this machine's, or the image's, asked in a sandbox of it."""
    from workflows.tasks.swe.prefetch import host_target, image_target

    if chosen.image == "host":
        return host_target()
    from sandbox.choose import choose
    from sandbox.protocols import SandboxSpec
    from sandbox.scratch import owned
    from stages.images import ImageStore

    with owned(chosen.scratch or Path(tempfile.gettempdir()), "rollmill-prefetch-") as scratch:
        unpacked = await asyncio.to_thread(ImageStore(store, scratch / "images").unpacked, chosen.image)
        spec = SandboxSpec(image=unpacked.root, env=unpacked.env)
        async with await choose("auto", scratch) as backend:
            return await image_target(backend, spec)


_COMMANDS: dict[str, Callable[[ImageStore, list[str], _Chosen], int]] = {
    "import": _import,
    "list": _list,
    "verify": _verify,
}
