"""The text that drives bash."""

from __future__ import annotations

import subprocess

import pytest

from sandbox.bashtext import RUN_LINE, SETUP_LINE, command_packet, setup_script, shell_env


def test_the_typed_lines_fit_a_terminal() -> None:
    for line in (RUN_LINE, SETUP_LINE):
        assert line.endswith(b"\n") and line.count(b"\n") == 1 and len(line) < 255


def test_no_reserved_word_begins_what_the_shell_reads() -> None:
    assert not RUN_LINE.startswith((b"{", b"(", b"!", b"if", b"["))


def test_the_setup_is_valid_bash_whatever_the_names() -> None:
    names = ["/a b", "/quo'te", "/new\nline", "/$(touch x)", "/-dash"]
    subprocess.run(["bash", "-n", "-c", setup_script(names, "/it's here")], check=True)


def test_a_packet_ends_both_parts() -> None:
    assert command_packet("é\n", "n1") == "é\n".encode() + b"\0n1\0"
    assert command_packet("\udcff", "n") == b"\xff\0n\0"
    with pytest.raises(ValueError, match="NUL"):
        command_packet("a\0b", "n")


def test_a_surrogate_that_is_no_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        command_packet("\ud800", "n")


def test_the_specs_variables_win() -> None:
    env = shell_env({"PATH": "/mine", "A": "b"})
    assert env["PATH"] == "/mine" and env["A"] == "b" and env["HOME"] == "/root" and env["PS1"] == ""
