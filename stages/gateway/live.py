"""A turn's text while it is sampled: decoded as its tokens come, shown as soon as nothing that follows can change it.

Held back is what may still become something else: the bytes of a character that is not whole, an end token, the start
of a stop text, and whatever may be a tool call, from its first character on. What all deltas of a stream come to is the
text of the whole answer, so that a turn is the same to its client whether it was streamed or not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from stages.toolformats import ToolFormat
from stages.waiters import wake

CALL: Final = "<tool_call>"
"""Begins a call in the formats with tags."""
MAX_STOP_CHARS: Final = 4096
"""Stop texts of more characters together, and their turn is shown when it is whole."""
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
_HALF: Final = "\ufffd"
_GROWTH: Final = 1.25
"""What does not decode to whole characters is tried again when it has grown so much: models can sample nonsense."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first token.

    Args:
        number: names it among the session's.
        created: seconds since 1970.
        model: as the client named it.
        prompt_tokens: of the whole stream before it.
    """

    number: str
    created: int
    model: str
    prompt_tokens: int


class Live:
    """One turn, for the streams that show it. All of it happens in one event loop.

    Args:
        decode: text of ids.
        spell: the vocabulary's spelling of an id.
        ends: ids that end a turn.
        stops: texts that end the answer.
        form: of the tool calls that are read out of it; None: none are.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], spell: Callable[[int], str], ends: Collection[int],
        stops: Sequence[str], form: ToolFormat | None,
    ) -> None:  # fmt: skip
        self._ends, self._decoding, self._holding = ends, Decoding(decode, spell), Holding(stops, form)
        self._ids: list[int] = []
        self._fed = 0
        self._texts: list[str] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self.changes = 0
        """Grows with everything that happens."""
        self.started: Started | None = None
        """Set when the turn's prompt stands."""
        self.left = False
        """Its client left, and the turn with it."""

    @property
    def begun(self) -> bool:
        """Whether a token has been sampled."""
        return bool(self._ids)

    def hear(self, token_ids: Sequence[int]) -> None:
        """See Listener."""
        self._ids += token_ids
        self.wake()

    def retract(self, count: int) -> bool:
        """See Listener."""
        if self._fed > len(self._ids) - count:
            return False
        del self._ids[len(self._ids) - count :]
        return True

    def texts(self) -> list[str]:
        """All deltas so far; what comes later is appended to this list."""
        end = len(self._ids)
        if end > self._fed and self._ids[-1] in self._ends:
            end -= 1
        if end > self._fed:
            text = self._holding.more(self._decoding.more(self._ids[self._fed : end]))
            self._fed = end
            if text:
                self._texts.append(text)
        return self._texts

    def wake(self) -> None:
        """Something happened."""
        self.changes += 1
        for waiter in self._waiting:
            wake(waiter)
        self._waiting.clear()

    async def after(self, seen: int, timeout_s: float) -> None:
        """Return when more has happened than so many changes, or the time is over."""
        if self.changes != seen:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.add(waiter)
        timer = loop.call_later(timeout_s, wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)


class Decoding:
    """Text of ids that come one after the other, in whole characters.

    New ids are decoded behind those of the last delta, as some tokenizers write a word's space by what is before it.
    Some have tokens of single bytes, of which a whole run is characters or none is: it is decided by what follows it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], spell: Callable[[int], str]) -> None:
        self._decode, self._spell = decode, spell
        self._window: list[int] = []
        self._shown, self._shown_ids = "", 0
        self._try_at = 0

    def more(self, ids: Sequence[int]) -> str:
        """The text that these add; nothing where it ends amid a character."""
        self._window += ids
        new = len(self._window) - self._shown_ids
        if new < self._try_at or _BYTE.fullmatch(self._spell(self._window[-1])):
            return ""
        text = self._decode(self._window)
        if text.endswith(_HALF) or not text.startswith(self._shown):
            self._try_at = int(new * _GROWTH) + 1
            return ""
        added = text[len(self._shown) :]
        del self._window[: self._shown_ids]
        self._shown, self._shown_ids, self._try_at = self._decode(self._window), len(self._window), 0
        return added


class Holding:
    """What of a text may be shown, as it grows.

    Args:
        stops: texts that end it where the first of them begins.
        form: of the tool calls in it, without which space around it counts; None: it is shown as it is.
    """

    def __init__(self, stops: Sequence[str], form: ToolFormat | None) -> None:
        self._marks = list(stops) if form in (None, "python") else [*stops, CALL]
        self._strips, self._lists = form is not None, form == "python"
        self._shut = sum(map(len, stops)) > MAX_STOP_CHARS
        self._pending, self._begun = "", False

    def more(self, text: str) -> str:
        """What may be shown now that so much was added."""
        if self._shut or not text:
            return ""
        self._pending += text
        if self._lists and not self._begun and self._pending.lstrip()[:1] in ("[", "<"):
            self._shut = True  # a list of calls, or what may stand before one
            return ""
        found = end = len(self._pending)
        for mark in self._marks:
            at = self._pending.find(mark)
            found = min(found, at if at >= 0 else found)
            end = min(end, found, _start_of(mark, self._pending))
        self._shut = end == found < len(self._pending)
        shown = self._pending[:end]
        if self._strips:
            shown = shown.rstrip()
        self._pending = self._pending[len(shown) :]
        if self._strips and not self._begun:
            shown = shown.lstrip()
        self._begun = self._begun or bool(shown)
        return shown


def _start_of(mark: str, text: str) -> int:
    """Where the text ends in what may become the mark; its length where it does not."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return at
        at = text.find(mark[0], at + 1)
    return len(text)
