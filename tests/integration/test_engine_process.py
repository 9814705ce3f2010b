"""The engine's process: its key, its start with what cannot be served, and its end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.engine_process import EngineProcess, generate, metric, running_engine, spawn, until
from tests.support.tiny_qwen import tiny_config, write_model

MAX_LEN = 2048


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", tiny_config(max_len=MAX_LEN))


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running_engine(model_dir, tmp_path_factory.mktemp("engine"), "--weight-version", "17") as process:
        yield process


def test_api_key_guards_what_vllm_guards(model_dir: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sesame\n")
    with running_engine(model_dir, tmp_path / "engine", "--api-key-file", str(key_file)) as engine:
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
        with httpx.Client(base_url=engine.url, timeout=30) as client:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
                for response in (
                    client.post("/inference/v1/generate", json=body, headers=headers),
                    client.get("/v1/models", headers=headers),
                ):
                    assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
            right = {"Authorization": "Bearer sesame"}
            assert client.post("/inference/v1/generate", json=body, headers=right).status_code == 200
            assert client.get("/health").status_code == 200


def test_sigterm_gives_open_requests_what_they_have(model_dir: Path, tmp_path: Path) -> None:
    with running_engine(model_dir, tmp_path / "engine") as engine, ThreadPoolExecutor(1) as pool:
        with httpx.Client(base_url=engine.url, timeout=30) as client, httpx.Client(base_url=engine.url) as watcher:
            asked = pool.submit(generate, client, [5, 6, 7], max_tokens=2000, ignore_eos=True)
            until(lambda: metric(watcher, "num_requests_running") == 1, "the request runs")
            engine.process.send_signal(signal.SIGTERM)
            choice = asked.result(timeout=20)["choices"][0]
        assert engine.process.wait(timeout=20) == 0
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 2000
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(choice["token_ids"])}]
    assert "Traceback" not in engine.log.read_text()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [("model.safetensors", "no weights"), ("tokenizer.json", "tokenizer.json"), ("config.json", "config.json")],
)
def test_an_unusable_model_is_one_line_and_exit_1(tmp_path: Path, spoil: str, words: str) -> None:
    directory = write_model(tmp_path / "spoiled", tiny_config())
    (directory / spoil).unlink()
    process = spawn(directory, tmp_path / "port", tmp_path / "log")
    assert process.wait(timeout=30) == 1
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert str(directory) in lines[0]
    assert not (tmp_path / "port").exists()


def test_a_taken_port_is_one_line_and_exit_1(engine: EngineProcess, model_dir: Path, tmp_path: Path) -> None:
    port = engine.url.rpartition(":")[2]
    process: subprocess.Popen[bytes] = spawn(model_dir, tmp_path / "port", tmp_path / "log", "--port", port)
    assert process.wait(timeout=30) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()
