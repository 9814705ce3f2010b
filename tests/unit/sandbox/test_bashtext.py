"""The text that drives bash."""

from __future__ import annotations

import subprocess

import pytest

from sandbox.bashtext import (
    NONCE_CHARS,
    TYPED_CHARACTERS,
    command_packet,
    setup_packet,
    setup_script,
    shell_env,
)

NONCE = "0" * NONCE_CHARS


def test_the_typed_lines_fit_a_terminal() -> None:
    for _, line in (command_packet("x" * 10**8, NONCE), setup_packet("x" * 10**8, NONCE)):
        assert line.endswith(b"\n") and line.count(b"\n") == 1 and len(line) < 255


def test_no_reserved_word_begins_what_the_shell_reads() -> None:
    assert not command_packet("true", NONCE)[1].startswith((b"{", b"(", b"!", b"if", b"["))


def test_the_setup_is_valid_bash_whatever_the_names() -> None:
    names = ["/a b", "/quo'te", "/new\nline", "/$(touch x)", "/-dash"]
    subprocess.run(["bash", "-n", "-c", setup_script(names, "/it's here")], check=True)


def test_what_is_plain_ascii_is_announced_by_its_length_and_all_else_ends_in_a_nul() -> None:
    plain = "#" * TYPED_CHARACTERS
    assert command_packet(plain, "n1") == (plain.encode() + b"n1", b'__rm_go "$?" 960 2>/dev/null;eval "$__rm_c"\n')
    assert command_packet("é\n", "n1")[0] == "é\n".encode() + b"\0n1" and b' "$?" 0 ' in command_packet("é\n", "n1")[1]
    assert command_packet("\udcff", "n")[0] == b"\xff\0n"
    assert b"-N 2 " in setup_packet("ab", "n")[1] and b"-d ''" in setup_packet("é", "n")[1]
    with pytest.raises(ValueError, match="NUL"):
        command_packet("a\0b", "n")


@pytest.mark.parametrize("command", ["", "a'b\\'c\\\\", "x\n\ty", "a!b!!", '$HOME `x` "q" %s {}', "'" * 479])
def test_what_is_short_and_printable_is_typed_as_one_quoted_line(command: str) -> None:
    packet, line = command_packet(command, NONCE)
    assert packet == NONCE.encode() and line.startswith(b"eval $'") and len(line) < 1024
    assert line.count(b"\n") == 1 and line[:-1].decode().isprintable() and b"!" not in line
    shown = subprocess.run(["bash"], input=line.replace(b"eval", b"printf %s"), capture_output=True, check=True)
    assert shown.stdout.decode() == command


@pytest.mark.parametrize("command", ["\x03", "\r", "\x1b[A", "\x7f", "'" * 480, "ü"])
def test_what_a_terminal_would_take_for_a_key_is_not_typed(command: str) -> None:
    packet, line = command_packet(command, NONCE)
    assert packet.startswith(command.encode()) and line.startswith(b"__rm_go ")


def test_a_surrogate_that_is_no_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        command_packet("\ud800", "n")


def test_the_specs_variables_win() -> None:
    env = shell_env({"PATH": "/mine", "A": "b"})
    assert env["PATH"] == "/mine" and env["A"] == "b" and env["HOME"] == "/root" and env["PS1"] == ""
