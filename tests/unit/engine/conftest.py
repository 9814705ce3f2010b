"""A random tiny Qwen3, written once a session and loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.engine.qwen3 import Qwen3
from tests.support.tiny_qwen import tiny_config, write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "model", tiny_config())


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Qwen3:
    return Qwen3.load(model_dir)
