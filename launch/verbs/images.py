"""`rollmill images`: builds and imports root file systems, lists, checks and prunes them, and fetches wheels ahead."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import asdict

from launch.errors import CommandError, Exit
from launch.verbs.arguments import VerbParser

if TYPE_CHECKING:
    from sandbox.images.build import Builder
    from sandbox.images.pack import PackedImage
    from sandbox.protocols import SandboxBackend
    from stages.imagerecords import Imported
    from stages.images import ImageStore
    from stages.layout import StoreLayout
    from workflows.wheels.target import PythonTarget

STORE = "runs/store"
"""Where runs that are launched from this directory look, as long as no other store was named."""
_BUILT = ("build", "import", "list", "verify", "prune", "prefetch")
_DAY_S = 86400.0
_GIB = 1024**3


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
        if chosen.command == "prune":
            return _prune(StoreLayout(store), chosen.names, chosen)
        return _COMMANDS[chosen.command](ImageStore(StoreLayout(store)), chosen.names, chosen)
    except SandboxError as error:
        raise CommandError(str(error)) from error


def _path(text: str) -> Path:
    """A path that may begin with somebody's home."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise CommandError(f"{text}: there is no such home directory: give a path from / or from here") from error


def _amount(text: str) -> float:
    """A number from 0 that is one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return value


class _Chosen:
    """The arguments."""

    command: str
    names: list[str]
    store: str
    scratch: Path | None
    replace: bool
    image: str
    network: Literal["none", "open"]
    timeout: float
    older_than: float | None
    quota: float | None
    node: float | None
    dry_run: bool
    json: bool


def _parse(name: str, args: Sequence[str]) -> _Chosen:
    parser = VerbParser(
        prog=f"rollmill {name}",
        description="sandbox images: build NAME DEFINITION, import NAME SOURCE, list, verify [NAME ...], "
        "prune [NAME ...], prefetch TASKFILE",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=_BUILT, metavar="COMMAND", help=", ".join(_BUILT))
    parser.add_argument(
        "names", nargs="*", metavar="ARG",
        help="build: NAME and an Apptainer definition file, whose base may be an image of the store (Bootstrap: "
        "localimage); import: NAME and SOURCE, a root file system directory, a tar of one (gzip, bzip2, xz, zstd or "
        "plain), a Docker or OCI archive, an OCI layout or a .sif; verify: names or digests, default all; prune: names "
        "that are no longer wanted; prefetch: a file of "
        "task=swe, whose wheels are fetched into the store where there is a network",
    )  # fmt: skip
    parser.add_argument("--store", default=STORE, metavar="DIR", help=f"the store; default: {STORE}; store=DIR also")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="local disk for what is unpacked meanwhile")
    parser.add_argument("--image", default="host", help="prefetch: the image whose Python the wheels are for")
    parser.add_argument(
        "--replace", action="store_true", help="build, import: let a name that is there mean the new content"
    )
    parser.add_argument(
        "--network", choices=("none", "open"), default="none",
        help="build: none runs %%post in a sandbox of ours; open lets Apptainer run it with this machine's network",
    )  # fmt: skip
    parser.add_argument("--timeout", type=_amount, default=3600.0, metavar="S", help="build: seconds a step may take")
    parser.add_argument("--older-than", type=_amount, metavar="DAYS", help="prune: layers not used for so long, too")
    parser.add_argument("--quota", type=_amount, metavar="GIB", help="prune: least used layers, until so much is left")
    parser.add_argument(
        "--node", type=_amount, metavar="GIB", help="prune: unpacked ones of this node, down to so much"
    )
    parser.add_argument("--dry-run", action="store_true", help="prune: only say what would go")
    parser.add_argument("--json", action="store_true", help="list, prune: for programs")
    return parser.parse_args(
        [f"--{arg}" if arg.startswith("store=") else arg for arg in args], namespace=_Chosen()
    )  # fmt: skip


def _import(images: ImageStore, names: list[str], chosen: _Chosen) -> int:
    if len(names) != 2:
        raise CommandError("import takes NAME and SOURCE; see rollmill images --help")
    return _told(images.add(names[0], _path(names[1]), replace=chosen.replace, scratch=chosen.scratch))


def _told(done: Imported) -> int:
    left_out = f", {done.dropped} devices, FIFOs or sockets left out" if done.dropped else ""
    sys.stdout.write(
        f"{done.name.name} {done.name.digest} {done.config.entries} names, {done.config.tar_bytes} bytes, "
        f"{done.config.size_bytes} packed{left_out}\n"
    )
    return Exit.DONE


def _list(images: ImageStore, names: list[str], chosen: _Chosen) -> int:
    if names:
        raise CommandError("list takes no names")
    if chosen.json:
        found = [{**asdict(record), **asdict(config)} for record, config in images.names()]
        sys.stdout.write(json.dumps(found) + "\n")
        return Exit.DONE
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
    from sandbox.nodecache import NodeCache
    from sandbox.protocols import SandboxSpec
    from sandbox.scratch import owned
    from stages.images import ImageStore

    place = chosen.scratch or Path(tempfile.gettempdir())
    with owned(place, "rollmill-prefetch-") as scratch, ExitStack() as holds:
        images = ImageStore(store, NodeCache(scratch / "images"))
        unpacked = await asyncio.to_thread(images.take, chosen.image, holds)
        spec = SandboxSpec(image=unpacked.root, env=unpacked.env)
        async with await choose("auto", scratch) as backend:
            return await image_target(backend, spec)


def _build(images: ImageStore, names: list[str], chosen: _Chosen) -> int:
    if len(names) != 2:
        raise CommandError("build takes NAME and DEFINITION; see rollmill images --help")
    from sandbox.images.build import Builder
    from stages.imagerecords import check_name, scratch_directory
    from stages.layout import StoreLayout

    file = _path(names[1]).absolute()
    check_name(names[0], StoreLayout(_path(chosen.store).absolute()))
    with scratch_directory(chosen.scratch) as place:
        built = asyncio.run(_built(images, file, Path(place), chosen, Builder))
        return _told(images.publish(names[0], built, str(file), replace=chosen.replace))


async def _built(images: ImageStore, file: Path, place: Path, chosen: _Chosen, builder: type[Builder]) -> PackedImage:
    from sandbox.choose import choose
    from sandbox.images.containers import Configured

    def stored(name: str, directory: Path) -> Configured | None:
        if not images.has(name):
            return None
        config = images.lay_out(name, directory)
        return Configured(config.env, config.workdir)

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    async with AsyncExitStack() as opened:
        backends: list[SandboxBackend] = []

        async def backend() -> SandboxBackend:
            if not backends:
                backends.append(await opened.enter_async_context(await choose("auto", place)))
            return backends[0]

        made = builder(
            home=place, stored=stored, backend=backend, network=chosen.network, timeout_s=chosen.timeout, tell=tell
        )  # fmt: skip
        return await made.build(file)


def _prune(store: StoreLayout, names: list[str], chosen: _Chosen) -> int:
    """Store first, then what this node keeps unpacked."""
    from sandbox.nodecache import NodeCache
    from stages.pruning import Pruned, Wish, prune

    wish = Wish(
        names, None if chosen.older_than is None else chosen.older_than * _DAY_S,
        None if chosen.quota is None else int(chosen.quota * _GIB),
    )  # fmt: skip
    gone: list[Pruned] = []
    try:
        for one in prune(store, wish, dry_run=chosen.dry_run):
            gone.append(one)
            if not chosen.json:
                unused = f"unused for {one.unused_s / _DAY_S:.1f} days"
                sys.stdout.write(f"{one.kind} {one.name} {one.size_bytes} bytes, {unused}: {one.why}\n")
    except OSError as error:
        raise CommandError(f"the store {store.root} cannot be pruned: {error}") from error
    unpacked: dict[str, Any] = {"names": [], "size_bytes": 0}
    if chosen.node is not None:
        base = chosen.scratch or Path(tempfile.gettempdir())  # as the workers of a run, whose cluster.scratch this is
        cache = NodeCache(base / f"rollmill-{os.getuid()}" / "layers")
        unpacked = asdict(cache.trim(int(chosen.node * _GIB), dry_run=chosen.dry_run))
    size = sum(one.size_bytes for one in gone)
    if chosen.json:
        document = {"dry_run": chosen.dry_run, "removed": [asdict(one) for one in gone], "size_bytes": size}
        sys.stdout.write(json.dumps({**document, "node": unpacked}) + "\n")
        return Exit.DONE
    for name in unpacked["names"]:
        sys.stdout.write(f"unpacked {name}\n")
    done = "would leave" if chosen.dry_run else "left"
    sys.stdout.write(f"{len(gone)} {done} the store, {size} bytes; {len(unpacked['names'])} this node, ")
    sys.stdout.write(f"{unpacked['size_bytes']} bytes\n")
    return Exit.DONE


_COMMANDS: dict[str, Callable[[ImageStore, list[str], _Chosen], int]] = {
    "build": _build,
    "import": _import,
    "list": _list,
    "verify": _verify,
}
