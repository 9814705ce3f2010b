"""`rollmill images`: brings root file systems into a store, lists what is there, and checks it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import CommandError, Exit
from launch.verbs.arguments import VerbParser

if TYPE_CHECKING:
    from stages.images import ImageStore

STORE = "runs/store"
"""Where runs that are launched from this directory look, as long as no other store was named."""
_BUILT = ("import", "list", "verify")


def run(name: str, args: Sequence[str]) -> int:
    """Do one of the verb's own commands."""
    chosen = _parse(name, args)
    from sandbox.errors import SandboxError
    from stages.images import ImageStore
    from stages.layout import StoreLayout

    store = Path(chosen.store).expanduser().absolute()
    images = ImageStore(StoreLayout(store))
    try:
        return _COMMANDS[chosen.command](images, chosen.names, chosen)
    except SandboxError as error:
        raise CommandError(str(error)) from error


class _Chosen:
    """The arguments."""

    command: str
    names: list[str]
    store: str
    scratch: Path | None
    replace: bool


def _parse(name: str, args: Sequence[str]) -> _Chosen:
    parser = VerbParser(
        prog=f"rollmill {name}",
        description="sandbox images: import NAME SOURCE, list, verify [NAME ...]",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=_BUILT, metavar="COMMAND", help=", ".join(_BUILT))
    parser.add_argument(
        "names", nargs="*", metavar="ARG",
        help="import: NAME and SOURCE, a root file system directory, a tar of one (gzip, bzip2, xz, zstd or plain), a "
        "Docker or OCI archive, an OCI layout or a .sif; verify: names or digests, default all",
    )  # fmt: skip
    parser.add_argument("--store", default=STORE, metavar="DIR", help=f"the store; default: {STORE}; store=DIR also")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="local disk for what is unpacked meanwhile")
    parser.add_argument("--replace", action="store_true", help="import: let a name that is there mean the new content")
    return parser.parse_args(
        [f"--{arg}" if arg.startswith("store=") else arg for arg in args], namespace=_Chosen()
    )  # fmt: skip


def _import(images: ImageStore, names: list[str], chosen: _Chosen) -> int:
    if len(names) != 2:
        raise CommandError("import takes NAME and SOURCE; see rollmill images --help")
    done = images.add(names[0], Path(names[1]).expanduser(), replace=chosen.replace, scratch=chosen.scratch)
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


_COMMANDS: dict[str, Callable[[ImageStore, list[str], _Chosen], int]] = {
    "import": _import,
    "list": _list,
    "verify": _verify,
}
