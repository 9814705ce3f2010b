"""The makers' own clients pass the suite in front of a real vLLM that they pass in front of the embedded engine."""

from __future__ import annotations

from tests.support.client_suite import ClientSuite


class TestVllm(ClientSuite):
    """See ClientSuite."""
