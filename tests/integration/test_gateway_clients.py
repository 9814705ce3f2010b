"""The makers' own clients through a gateway in front of the embedded engine; `make test-vllm` has a real vLLM there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client_suite import ClientSuite
from tests.support.engine_process import running_engine
from tests.support.engine_suite import TINY, Engine

KEY = "clients-key"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    scratch = tmp_path_factory.mktemp("engine")
    (scratch / "key").write_text(KEY)
    with running_engine(TINY, scratch, "--dev-mode", "--api-key-file", str(scratch / "key")) as process:
        yield Engine(process.url, KEY, block=16)


class TestEmbedded(ClientSuite):
    """See ClientSuite."""
