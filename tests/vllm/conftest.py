"""Real vLLM servers for the tests of this directory, which `make test-vllm` alone collects."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from conf.schema import Config
from launch.replicas import Vllm, vllm_replica
from tests.support.engine_suite import CONTEXT, Engine

PYTHON = os.environ.get("ROLLMILL_TEST_VLLM")
"""An interpreter that has vLLM; `make test-vllm` names it."""
KEY = "a-key-of-the-tests"
BLOCK = 32
LONG = 1000
"""Some seconds of drawing on an idle machine, some minutes on a busy one."""
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


def config() -> Config:
    """fleet=vllm on CPUs, as a run has it, with tools read by the server too: rollmill's own clients need no parser."""
    made = Config()
    more = ["--max-model-len", str(CONTEXT), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return replace(
        made, fleet=replace(made.fleet, name="vllm", model="tiny", python=PYTHON, replicas=2, extra_args=more)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs that start servers of their own go first, before the shared ones are there: never four at once.

    The first test that needs the shared ones waits for their start: on a busy machine that takes minutes.
    """
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1500))
    items.sort(key=lambda item: "engine" in item.fixturenames or "engines" in item.fixturenames)  # type: ignore[attr-defined]


class Servers:
    """Two replicas by the product's own starter, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()

    def __enter__(self) -> list[Vllm]:
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(1200)

    async def _start(self) -> list[Vllm]:
        starting = [
            self._stack.enter_async_context(vllm_replica(config(), number, host="127.0.0.1", api_key=KEY))
            for number in (1, 2)
        ]
        return list(await asyncio.gather(*starting))

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stack.aclose(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture(scope="session")
def servers() -> Iterator[list[Vllm]]:
    """Two real servers that answer; about 25 s on two cores of their own."""
    with Servers() as running:
        yield running


@pytest.fixture(scope="session")
def engine(servers: list[Vllm]) -> Engine:
    """The first of them."""
    return Engine(servers[0].url, KEY, BLOCK, LONG)


@pytest.fixture(scope="session")
def engines(servers: list[Vllm]) -> list[Engine]:
    """Both."""
    return [Engine(one.url, KEY, BLOCK, LONG) for one in servers]


@pytest.fixture
def tell(capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[..., None]:
    """Shows a test's figures, also where it passes: docs/engines.md has them."""

    def show(**figures: Any) -> None:
        with capfd.disabled():
            print(f"\n{request.node.name}: {json.dumps(figures)}")

    return show
