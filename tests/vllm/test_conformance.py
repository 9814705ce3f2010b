"""A real vLLM passes the suite that the embedded engine passes in `make test`."""

from __future__ import annotations

from tests.support.engine_suite import EngineSuite


class TestVllm(EngineSuite):
    """See EngineSuite."""
