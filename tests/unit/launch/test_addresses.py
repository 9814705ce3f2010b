"""Which address a node's servers take, and that loopback is none for several nodes."""

from __future__ import annotations

import pytest

from launch import addresses
from launch.addresses import listen_address
from launch.errors import LaunchError
from tests.unit.launch.slurm.configs import make


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A node whose name and routes lead to itself alone; what its interfaces have."""
    there = {"lo": "127.0.0.1", "down0": "none"}
    monkeypatch.setattr(addresses, "_of_this_host", lambda: "127.0.1.1")
    monkeypatch.setattr(addresses.socket, "if_nameindex", lambda: list(enumerate(there)))
    monkeypatch.setattr(addresses, "_of", there.__getitem__)
    return there


@pytest.mark.parametrize("placement", ["linked", "het", "auto", "colocated"])
def test_a_node_that_has_another_address_must_say_which(loopback: dict[str, str], placement: str) -> None:
    loopback["ib0"] = "10.0.0.7"
    with pytest.raises(LaunchError, match=r"set cluster\.interface to one of ib0$"):
        listen_address(make(f"placement={placement}", "pools.run.nodes=2"))


def test_a_node_that_has_nothing_else_is_warned(loopback: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert listen_address(make("placement=linked")) == "127.0.1.1"
    assert "has the loopback address alone" in capsys.readouterr().err


def test_one_node_reaches_itself(loopback: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    loopback["ib0"] = "10.0.0.7"
    assert listen_address(make("placement=colocated")) == "127.0.1.1"
    assert capsys.readouterr().err == ""
