"""An engine's answer heard while it is sampled: its events read as they come, and what they come to as a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from stages.dialects import Completion, Piece, UnreadableAnswerError
from stages.trajectory import VersionSpan

Hear = Callable[[Piece], None]
"""Gets what an engine has sampled as soon as it says so; may not raise."""
_QUOTED_CHARS: Final = 200


class Events:
    """The body of a stream of server-sent events, in whatever parts it comes; called with each of them.

    Args:
        read: one event's data.
        hear: gets what each holds.
    """

    def __init__(self, read: Callable[[bytes], Piece], hear: Hear) -> None:
        self._read, self._hear = read, hear
        self._rest = b""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionSpan] = []
        self._finish: str | None = None
        self._cached = 0
        self._broken: str | None = None
        self.began = False
        """Whether any part has come: the answer is a stream."""

    def __call__(self, part: bytes) -> None:
        """The next bytes."""
        self.began = True
        if self._broken is not None:
            return
        *lines, self._rest = (self._rest + part).split(b"\n") if self._rest else part.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    self._take(line[5:].strip())
                except UnreadableAnswerError as error:
                    self._broken = f"{error}: {line[:_QUOTED_CHARS].decode('utf-8', 'replace')}"
                    return

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        piece = self._read(data)
        self._ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._versions = piece.versions or self._versions
        self._finish = piece.finish_reason or self._finish
        self._cached = self._cached if piece.cached_tokens is None else piece.cached_tokens
        if piece.token_ids:
            self._hear(piece)

    def completion(self, llm_s: float) -> Completion:
        """All of it, once the stream has ended.

        Raises:
            UnreadableAnswerError: it ended early, or held something else, such as an error.
        """
        if self._broken is not None:
            raise UnreadableAnswerError(self._broken)
        if self._finish is None:
            raise UnreadableAnswerError(f"the stream ended after {len(self._ids)} tokens without a finish reason")
        return Completion(self._ids, self._logprobs, self._finish, self._versions, self._cached, llm_s)


class Listener(Protocol):
    """Who wants a turn's ids while they are sampled."""

    def hear(self, token_ids: Sequence[int]) -> None:
        """So many more; may not raise."""
        ...

    def retract(self, count: int) -> bool:
        """The last so many are none; False where they were passed on, so that they must stay."""
        ...


class Heard:
    """What one try at a generation was heard to sample: what is left of it where its replica breaks off."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._last: Piece | None = None

    def __call__(self, piece: Piece) -> None:
        """The next piece."""
        self._last = piece
        self._ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._listener.hear(piece.token_ids)

    def ended(self, completion: Completion) -> None:
        """The try came to this; an engine that does not stream was not heard before."""
        if self._last is None:
            self._listener.hear(completion.token_ids)

    def broken_off(self, version: int, finish_reason: str) -> Completion | None:
        """What stays of a try that failed, or None: what is not whole and nobody was shown is sampled anew.

        Args:
            version: the policy's when the replica was named. It stands for what the engine did not come to tell: no
                version that sampled these tokens was older.
            finish_reason: of a generation that goes on elsewhere.
        """
        last, count = self._last, len(self._ids)
        if last is None:
            return None
        if last.finish_reason is not None:  # the end came, and what follows it did not
            return Completion(self._ids, self._logprobs, last.finish_reason, last.versions, 0, 0.0)
        if self._listener.retract(count):
            return None
        spans = [VersionSpan(version, 0, count)] if last.versioned else []
        return Completion(self._ids, self._logprobs, finish_reason, spans, 0, 0.0)
