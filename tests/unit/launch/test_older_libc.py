"""Programs of a newer glibc are carried or refused, tried on a program of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.older_libc import NotCarriedError, Program, main


@pytest.fixture
def program() -> bytearray:
    """Any program of this machine that imports from several versions of glibc."""
    return bytearray(Path("/bin/bash").resolve().read_bytes())


def test_what_needs_nothing_newer_is_left_alone(program: bytearray) -> None:
    before = bytes(program)
    assert Program(program).lead_back((9, 99)) == [] and bytes(program) == before


def test_what_needs_more_than_number_parsing_is_refused(program: bytearray) -> None:
    with pytest.raises(NotCarriedError, match=r"of a glibc newer than 2\.3$"):
        Program(program).lead_back((2, 3))


def test_imports_are_led_back_to_the_oldest_version(program: bytearray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every newer import stands for one of number parsing; an empty prefix changes no name."""
    every = type("Every", (), {"__contains__": lambda self, name: True})()
    monkeypatch.setattr("launch.older_libc.CARRIED", every)
    monkeypatch.setattr("launch.older_libc.PREFIX", b"")
    changed = Program(program).lead_back((2, 32))
    assert changed
    assert Program(program).lead_back((2, 32)) == []


def test_a_tree_is_changed_as_a_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "bash").write_bytes(Path("/bin/bash").resolve().read_bytes())
    assert main(tmp_path) == 0
    (tmp_path / "odd").write_bytes(b"\x7fELF\x01\x01" + bytes(100))
    assert main(tmp_path) == 1
    assert "no 64-bit little-endian ELF file" in capsys.readouterr().err
