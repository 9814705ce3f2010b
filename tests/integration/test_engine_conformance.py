"""The embedded engine does what a real vLLM does: the suite that `make test-vllm` runs against one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_process import running_engine
from tests.support.engine_suite import TINY, Engine, EngineSuite

KEY = "conformance-key"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    scratch = tmp_path_factory.mktemp("engine")
    (scratch / "key").write_text(KEY)
    with running_engine(TINY, scratch, "--dev-mode", "--api-key-file", str(scratch / "key")) as process:
        yield Engine(process.url, KEY, block=16)


class TestEmbedded(EngineSuite):
    """See EngineSuite."""
