"""Editing by lines, the history of edits, and the screen of a terminal."""

from __future__ import annotations

import pytest

from sandbox import history
from sandbox.editing import SHOWN_CHARACTERS, inserted, numbered, replaced
from sandbox.errors import FilesError
from sandbox.history import Before, History
from sandbox.screen import KEPT_BYTES, TerminalScreen, key_bytes


def test_lines_are_shown_by_their_numbers() -> None:
    assert numbered(b"a\nb\nc\n", 2, 3) == "     2\tb\n     3\tc"
    assert numbered(b"a\nb", 1, -1) == "     1\ta\n     2\tb"
    assert numbered(b"a\n\xff", 2, 99) == "     2\t\ufffd"
    for first, last in ((0, 1), (3, 3), (2, 1)):
        with pytest.raises(ValueError, match="it has 2 lines"):
            numbered(b"a\nb\n", first, last)
    long = numbered(b"x" * 200 + b"\n" + b"line\n" * 100_000, 1, None)
    assert len(long) < SHOWN_CHARACTERS + 200 and long.endswith("of 100001: view a smaller range]")


def test_lines_are_put_in() -> None:
    assert inserted(b"a\nb\n", 0, b"x") == b"x\na\nb\n"
    assert inserted(b"a\nb\n", 2, b"x\n") == b"a\nb\nx\n"
    assert inserted(b"a\nb", 2, b"x") == b"a\nb\nx" and inserted(b"", 0, b"x") == b"x"
    with pytest.raises(ValueError, match="no line 3: it has 2 lines"):
        inserted(b"a\nb\n", 3, b"x")


def test_a_text_that_occurs_twice_is_told_with_its_lines() -> None:
    with pytest.raises(FilesError, match=r"2 times in '/f' \(lines 1, 3\)"):
        replaced("/f", b"a\nb\na\n", b"a", b"x")
    assert replaced("/f", b"a\nb\n", b"b", b"") == b"a\n\n"


def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_BYTES", 10)
    kept = History()
    kept.add("/a", Before("/a", b"12345", 0o644))
    kept.add("/b", Before("/b", b"123456", 0o644))
    assert kept.last("/a") is None and kept.last("//b") is not None
    kept.forget("/b")
    assert kept.last("/b") is None


def test_a_screen_is_what_a_person_sees() -> None:
    answers: list[bytes] = []
    screen = TerminalScreen(4, 20, answers.append)
    screen.add(b"hello\r\nworld\x1b[1;1HJ\x1b[6n")
    seen = screen.look(*screen.take(), running=True, exit_code=None)
    assert (seen.text, seen.row, seen.column) == ("Jello\nworld", 0, 1) and answers == [b"\x1b[1;2R"]


@pytest.mark.parametrize(
    "hostile", [b"\x1b[" + b"9" * 60_000 + b"m", b"\x1b]0;" + b"t" * 60_000, b"\x1b[?1;2;3c\x1b[99999L"]
)
def test_a_hostile_screen_is_survived(hostile: bytes) -> None:
    screen = TerminalScreen(4, 20, lambda data: None)
    screen.add(hostile)
    screen.look(*screen.take(), running=True, exit_code=None)
    screen.add(b"y" * (3 * KEPT_BYTES) + b"\r\n\x07\x1b[2J\x1b[Hback")
    data, dropped = screen.take()
    seen = screen.look(data, dropped, running=False, exit_code=0)
    assert len(data) <= KEPT_BYTES and seen.text.endswith("back") and seen.dropped > KEPT_BYTES


def test_keys_have_names() -> None:
    assert key_bytes("ctrl-c") == b"\x03" and key_bytes("Enter") == b"\r"
    with pytest.raises(ValueError, match="no key is called 'hyper'"):
        key_bytes("hyper")
