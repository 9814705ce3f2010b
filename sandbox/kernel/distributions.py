"""ipykernel and what it needs, out of this installation, in a directory of its own: for images that have none.

Run as a program by the spawner, once an installation or user, so that neither copying nor compiling holds up an event
loop. Files are linked where that is possible. The modules that a kernel loads are compiled: the mount that sandboxes
see is read-only, so every start would compile them anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import py_compile
import re
import shutil
import sys
from pathlib import Path

from sandbox.kernel.program import LENT, LIBRARIES

ROOT = "ipykernel"
LEFT_OUT = frozenset({"debugpy", "jedi", "parso", "tzdata"})
"""The debugger and the completion, which nobody uses here: most of the bytes, and part of each start."""
WARMED = (
    "ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell", "ipykernel.subshell_manager", "IPython",
    "IPython.core.interactiveshell", "IPython.core.completer", "IPython.core.pylabtools", "matplotlib_inline.config",
    "matplotlib_inline.backend_inline", "pygments.lexers.python", "pygments.formatters.terminal256",
    "pygments.styles.default", "stack_data", "zmq.eventloop.zmqstream", "tornado.platform.asyncio", "tornado.queues",
    "ipykernel.debugger", "IPython.core.debugger", "IPython.core.completerlib", "IPython.core.logger",
    "IPython.core.oinspect", "IPython.extensions.storemagic", "traitlets.config.argcomplete_config",
)  # fmt: skip
DONE = ".complete"


def needed(root: str = ROOT) -> list[importlib.metadata.Distribution]:
    """The distributions that `root` needs, itself first, as far as they are installed here.

    Raises:
        PackageNotFoundError: `root` is not.
    """
    found = {root: importlib.metadata.distribution(root)}
    waiting = [root]
    while waiting:
        for requirement in found[waiting.pop()].requires or ():
            if (name := _name(requirement)) in found or name in LEFT_OUT:
                continue
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform or extra
                if not re.search(r";.*\bextra\b", requirement):
                    found[name] = importlib.metadata.distribution(name)
                    waiting.append(name)
    return list(found.values())


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def build(target: Path) -> None:
    """Lay them out in `target`, a directory that does not exist, with the compiled form of what a kernel loads.

    The compiled files are the installation's own; where it has none yet, importing makes them, there if that may be
    written, so that the next worker finds them, else in `target`.
    """
    target.mkdir(mode=0o755)
    files = [
        (Path(str(distribution.locate_file(file))), target / file)
        for distribution in needed()
        for file in distribution.files or ()
        if not {"..", "__pycache__", "tests"} & set(file.parts) and not file.is_absolute()
    ]
    spare = warm()
    for source, place in files:
        if source.is_file():
            _link(source, place)
            if compiled := _compiled(source):
                _link(compiled, Path(importlib.util.cache_from_source(str(place))))
            elif source in spare:
                py_compile.compile(str(place), quiet=2)
    _lend_libraries(target / LIBRARIES)
    (target / DONE).write_text(inventory(target))


def inventory(directory: Path) -> str:
    """A digest of the names and sizes of all files below, but for the mark of completeness that holds it.

    Compiled files are left out: a kernel that nothing isolates writes further ones there.
    """
    found = []
    for place, below, names in os.walk(directory):
        below[:] = [one for one in below if one != "__pycache__"]
        at = os.path.relpath(place, directory)
        found += [f"{at}/{name} {os.lstat(f'{place}/{name}').st_size}" for name in names if name != DONE]
    return hashlib.sha256("\n".join(sorted(found)).encode("utf-8", "surrogateescape")).hexdigest()


def _lend_libraries(target: Path) -> None:
    """The C++ runtime that pyzmq has loaded here: small images have none."""
    importlib.import_module("zmq")
    target.mkdir()
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for library in mapped:
        for name in LENT:
            if library.name.startswith(name):
                _link(library, target / name)


def warm() -> set[Path]:
    """Import what a kernel loads; the files that were loaded."""
    for name in WARMED:
        with contextlib.suppress(ImportError):  # of another version, or of a library that only the image may have
            importlib.import_module(name)
    return {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}


def _compiled(source: Path) -> Path | None:
    """Where the compiled form of a module lies, if there is one."""
    if source.suffix != ".py":
        return None
    place = Path(importlib.util.cache_from_source(str(source)))
    return place if place.exists() else None


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def main() -> None:
    """Entry point: the target, and where the distributions are installed."""
    target, *places = sys.argv[1:]
    sys.path += places
    build(Path(target))
