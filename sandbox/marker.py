"""Where one command's output ends: the marker that bash prints, found in a stream and taken apart. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_END = b"\0"  # the only byte that no directory name holds
_LONGEST_TAIL = 64 * 1024


@dataclass(frozen=True)
class Marker:
    """What bash says after a command: its exit code and the shell's directory."""

    exit_code: int
    cwd: str


class BoundedOutput:
    """The first and the last half of `limit` bytes of a stream of any length."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self._total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self._half:  # trimmed rarely: each trim copies what is kept
                del self._tail[: -self._half]

    @property
    def truncated(self) -> bool:
        """Bytes were left out."""
        return self._total > 2 * self._half

    def text(self) -> str:
        """Head and tail as UTF-8 with replacement, and between them a line that says how many bytes are missing."""
        if not self._tail:
            return self._head.decode("utf-8", "replace")
        if not self.truncated:
            return (bytes(self._head) + bytes(self._tail)).decode("utf-8", "replace")
        missing = self._total - len(self._head) - self._half
        head, tail = self._head.decode("utf-8", "replace"), self._tail[-self._half :].decode("utf-8", "replace")
        return f"{head}\n[... {missing} bytes left out ...]\n{tail}"


class MarkerScanner:
    """Splits a terminal's stream into output and the marker that carries the given nonce.

    The nonce is drawn for each command and reaches bash only after the command has ended, so no output holds it before.
    """

    def __init__(self, nonce: str, output: BoundedOutput) -> None:
        self._start = marker_start(nonce)
        self._output = output
        self._held = b""
        self._in_marker = False

    def feed(self, data: bytes) -> Marker | None:
        """Take the next bytes; the marker once it is complete (what follows it in `data` is dropped).

        Raises:
            ValueError: what follows the nonce is no marker.
        """
        held = self._held + data if self._held else data
        if not self._in_marker:
            at = held.find(self._start)
            if at < 0:
                keep = _overlap(held, self._start)
                self._output.add(held[: len(held) - keep])
                self._held = held[len(held) - keep :] if keep else b""
                return None
            self._output.add(held[:at])
            held = held[at + len(self._start) :]
            self._in_marker = True
        end = held.find(_END)
        if end < 0:
            if len(held) > _LONGEST_TAIL:
                raise ValueError(f"the marker has no end after {len(held)} bytes")
            self._held = held
            return None
        self._held = b""
        code, _, cwd = held[:end].partition(b" ")
        return Marker(int(code), cwd.decode("utf-8", "replace"))

    def flush(self) -> None:
        """The stream ended without a marker: what was held back was output."""
        if not self._in_marker:
            self._output.add(self._held)
        self._held = b""


def marker_start(nonce: str) -> bytes:
    """The bytes that a marker begins with."""
    return b"\x1e" + nonce.encode() + b" "


def _overlap(data: bytes, start: bytes) -> int:
    """How many bytes at the end of `data` could begin `start`."""
    at = data.rfind(start[:1], max(0, len(data) - len(start) + 1))
    while at >= 0:
        if start.startswith(data[at:]):
            return len(data) - at
        at = data.rfind(start[:1], max(0, len(data) - len(start) + 1), at)
    return 0
