"""Fixtures of the sandbox's integration tests: every backend that isolates, by name, and a real image."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.layers import unpack
from tests.integration.sandbox.grounds import ISOLATING, PACKED_IMAGE


@pytest.fixture(params=ISOLATING)
def isolating(request: pytest.FixtureRequest) -> str:
    """Each backend that isolates."""
    return str(request.param)


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' image, unpacked by and for this user."""
    packed = next(Path(__file__).parents[4].glob(PACKED_IMAGE.format("*")), None)
    if packed is None:
        from tests.support.images import cached_root

        return cached_root()
    directory = packed.parent / "work/root"  # one for all the files of that user's suite; goes with the copy
    if not directory.exists():
        new = tmp_path_factory.mktemp("image") / "root"
        digest = "sha256:" + packed.name.removeprefix(PACKED_IMAGE.partition("{")[0]).partition(".")[0]
        with packed.open("rb") as file:
            unpack(file, new, digest=digest)
        new.rename(directory)
    return directory
