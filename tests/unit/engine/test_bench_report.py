"""The benchmark's object: its envelope, and its exit code."""

from __future__ import annotations

import json

import pytest

from tests.bench.report import emit


def test_envelope(capsys: pytest.CaptureFixture[str]) -> None:
    assert emit("x", {"a_ms": 1.5}, peers={"them": {"a_ms": 3.0}}, ratios={"a_x_them": 0.5}) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["bench", "v", "machine", "results", "peers", "ratios", "errors"]
    assert (report["bench"], report["v"], report["results"], report["errors"]) == ("x", 1, {"a_ms": 1.5}, [])
    assert report["machine"]["cpus"] >= 1


def test_errors_show_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert emit("x", {"a_ms": 1.5}, errors=["the peer did not start"], as_json=False) == 1
    assert "a_ms" in (shown := capsys.readouterr().out)
    assert "error: the peer did not start" in shown
