"""Which policy this is: digests of a model directory's weights, tokenizer and template."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from stages.chat import ChatTokenizer
from stages.trajectory import ModelIdentity

WHOLE_BYTES: Final = 256 << 20
EDGE_BYTES: Final = 1 << 20


def identify(name: str, directory: Path, chat: ChatTokenizer) -> ModelIdentity:
    """The identity that goes into every row. Blocking: it reads the weights."""
    return ModelIdentity(name, weights_digest(directory), chat.digest, chat.template_digest)


def weights_digest(directory: Path) -> str:
    """sha256 over names, sizes and bytes of the safetensors files.

    Of files above 256 MiB only the first and last MiB are read: the header names every tensor's place, and a file of
    100 GB must not be read by every worker.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
            else:
                digest.update(file.read(EDGE_BYTES))
                file.seek(-EDGE_BYTES, 2)
                digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()
