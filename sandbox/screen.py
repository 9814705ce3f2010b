"""What a terminal shows: a program's output, interpreted as a person's terminal would, within bounds."""

from __future__ import annotations

from collections.abc import Callable

import pyte

from sandbox.protocols import Screen

KEPT_BYTES = 64 * 1024
"""Of output that nobody has looked at yet: interpreting costs a second a megabyte, so older bytes are dropped."""
KEYS = {
    "enter": b"\r", "tab": b"\t", "escape": b"\x1b", "backspace": b"\x7f", "delete": b"\x1b[3~", "space": b" ",
    "up": b"\x1b[A", "down": b"\x1b[B", "right": b"\x1b[C", "left": b"\x1b[D", "home": b"\x1b[H", "end": b"\x1b[F",
    "pageup": b"\x1b[5~", "pagedown": b"\x1b[6~",
}  # fmt: skip
"""Keys by name; "ctrl-x" is the control character of x."""


def key_bytes(name: str) -> bytes:
    """What a key sends, by its name.

    Raises:
        ValueError: no key has that name; the message lists them.
    """
    lowered = name.lower()
    if lowered.startswith("ctrl-") and len(lowered) == 6 and "a" <= lowered[5] <= "z":
        return bytes([ord(lowered[5]) & 0x1F])
    if lowered not in KEYS:
        raise ValueError(f"no key is called {name!r}; the keys are: {', '.join(KEYS)}, ctrl-a to ctrl-z")
    return KEYS[lowered]


class _Answering(pyte.Screen):
    """Hands on what the terminal itself answers."""

    def __init__(self, columns: int, rows: int, answer: Callable[[bytes], object]) -> None:
        super().__init__(columns, rows)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data.encode())


class TerminalScreen:
    """The screen of one program.

    Args:
        rows: of the terminal.
        columns: of the terminal.
        answer: takes what the terminal itself answers, where a program asks where its cursor stands; called in `look`.
    """

    def __init__(self, rows: int, columns: int, answer: Callable[[bytes], object]) -> None:
        self._screen = _Answering(columns, rows, answer)
        self._stream = pyte.ByteStream(self._screen)
        self._unseen = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes; they are interpreted when somebody looks."""
        self._unseen += data
        if len(self._unseen) > 2 * KEPT_BYTES:
            self._dropped += len(self._unseen) - KEPT_BYTES
            del self._unseen[:-KEPT_BYTES]

    def take(self) -> tuple[bytes, int]:
        """What nobody has looked at yet, and how many bytes before it were dropped."""
        data = bytes(self._unseen[-KEPT_BYTES:])
        dropped = self._dropped + len(self._unseen) - len(data)
        self._unseen, self._dropped = bytearray(), 0
        return data, dropped

    def look(self, data: bytes, dropped: int, *, running: bool, exit_code: int | None) -> Screen:
        """The screen after these bytes; takes some 50 ms at most, and may be called in a thread.

        Args:
            data: from `take`.
            dropped: from `take`.
            running: whether the program runs.
            exit_code: of a program that has ended.
        """
        if dropped:
            self._restart()
        try:
            self._stream.feed(data)
        except Exception:  # noqa: BLE001 - whatever a program's bytes do to the interpreter, the next look starts afresh
            self._restart()
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        cursor = self._screen.cursor
        return Screen("\n".join(lines), cursor.y, cursor.x, running, exit_code, dropped)

    def _restart(self) -> None:
        self._screen.reset()
        self._stream = pyte.ByteStream(self._screen)
