"""What the image store writes of images, which names there may be, and the local directory that work on one needs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sandbox.errors import ImageError
from stages.layout import StoreLayout

HOST = "host"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,119}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST_FILE = 160
"""Characters of a name's file: 255 less what the name of a temporary file beside it adds."""


class ImageConfig(msgspec.Struct, frozen=True):
    """images/<sha256>.json: what an image says of itself beside its files.

    Args:
        env: variables of every process in it, as Docker's ENV.
        workdir: where its processes start; for people, the task decides.
        size_bytes: of the packed file.
        tar_bytes: of the uncompressed tar.
        entries: names in it.
    """

    env: dict[str, str]
    workdir: str | None
    size_bytes: int
    tar_bytes: int
    entries: int


class ImageName(msgspec.Struct, frozen=True):
    """images/names/<name>.json: what a name means, where it came from, and when (seconds since 1970).

    `env` and `workdir` are those of its own source, for the same files may be imported with others; without `env`, as
    in records of earlier versions, those of the files' first import hold.
    """

    name: str
    digest: str
    source: str
    imported_at: float
    env: dict[str, str] | None = None
    workdir: str | None = None


class UnpackedImage(msgspec.Struct, frozen=True):
    """An image ready for sandboxes on this node: `SandboxSpec.image`, and the variables of its processes."""

    root: str
    env: dict[str, str] = {}


class Imported(msgspec.Struct, frozen=True):
    """What an import brought: the name's record, and devices, FIFOs and sockets that were left out."""

    name: ImageName
    config: ImageConfig
    dropped: int


def check_name(name: str, layout: StoreLayout) -> None:
    """Refuse what no image can be called.

    Raises:
        ImageError: it is no name.
    """
    if not NAME.fullmatch(name) or name == HOST or DIGEST.fullmatch(name):
        raise ImageError(
            f"{name!r} is no image name: use letters, digits and ._:/@+- (not {HOST!r}, no digest)",
            boundary="images",
        )
    file = layout.image_name(name).name
    if len(file) > _LONGEST_FILE:
        raise ImageError(
            f"{name!r} is too long for a name: its file {file[:20]}... would have {len(file)} characters, "
            f"the most is {_LONGEST_FILE}: use fewer of /:@+",
            boundary="images",
        )


@contextmanager
def scratch_directory(parent: Path | None) -> Iterator[str]:
    """A directory on a local disk that goes away in the end."""
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="rollmill-image-", dir=parent)
    except OSError as error:
        raise ImageError(
            f"no scratch directory can be made in {parent or tempfile.gettempdir()}: {error.strerror}: "
            "give a directory of yours as --scratch",
            boundary="images",
        ) from error
    with made as place:
        yield place
