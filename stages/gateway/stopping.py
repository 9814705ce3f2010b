"""Ends a turn at a stop text, at the token that completes it, as an engine does that knows stop texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from stages.dialects import Completion
from stages.trajectory import VersionSpan


class Cut:
    """Ends a turn at the first of some texts; called with what each of the engines that sampled it came to.

    Args:
        decode: text of ids.
        texts: none empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], texts: Sequence[str]) -> None:
        self._decode, self._texts = decode, texts
        self._before: list[int] = []
        self.found: str | None = None

    def __call__(self, completion: Completion) -> Completion:
        """The completion as far as it goes; a text may have begun in the one before."""
        before, ids = len(self._before), [*self._before, *completion.token_ids]
        text = self._decode(ids)
        places = [(text.find(one), one) for one in self._texts if one in text]
        if not places:
            self._before = ids
            return completion
        self.found = min(places)[1]
        low, high = before + 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.found in self._decode(ids[:middle]) else (middle + 1, high)
        kept = low - before
        spans = [VersionSpan(s.version, s.start, min(s.end, kept)) for s in completion.versions if s.start < kept]
        return msgspec.structs.replace(
            completion, token_ids=completion.token_ids[:kept], logprobs=completion.logprobs[:kept], versions=spans,
            finish_reason="stop",
        )  # fmt: skip
