"""The key of an environment's layer: what it is made of, so that equal environments share one layer in the store."""

from __future__ import annotations

import hashlib
import platform

import msgspec

from stages.protocols import Environment

KEY_VERSION = 1


def environment_key(environment: Environment, image_digest: str) -> str:
    """sha256 over image, set-up and architecture, in hexadecimal; `workspace` and `protected` do not change the layer.

    Args:
        environment: as the task gives it.
        image_digest: the content digest of its image; of the host's root where the image is "host".
    """
    parts = [KEY_VERSION, image_digest, environment.setup_key, environment.network, platform.machine()]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
