"""The token stream of a chain: sampled tokens and observations appended, nothing ever decoded and encoded again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from stages.dialects import Ids
from stages.engine_client import Completion
from stages.errors import LLMError
from stages.trajectory import Chain, Turn, VersionSpan

ABORT = "abort"
"""Finish reason of a generation that the engine cut: what it drew so far is part of a turn that goes on."""


class TokenStream:
    """One chain being built. `ids` is the whole stream; its next prompt is the stream itself.

    Beside that list each stream is packed as it grows, so that a chain, taken at every checkpoint, costs three copies.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids = Ids(prompt)
        self._packed = array("i", self.ids)
        self._prompt_length = len(prompt)
        self._mask = bytearray(len(prompt))
        self._logprobs = array("f", bytes(4 * len(prompt)))
        self._versions: list[VersionSpan] = []
        self._turns: list[Turn] = []

    @classmethod
    def of(cls, chain: Chain) -> TokenStream:
        """The stream that gave this chain."""
        stream = cls(chain.token_ids)
        stream._prompt_length = chain.prompt_length
        stream._mask, stream._logprobs = bytearray(chain.packed_mask), array("f", chain.packed_logprobs)
        stream._versions, stream._turns = list(chain.policy_versions), list(chain.turns)
        return stream

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that nobody sampled: mask 0, log-prob 0."""
        self.ids += ids
        self._packed.extend(ids)
        self._mask += bytes(len(ids))
        self._logprobs.frombytes(bytes(4 * len(ids)))

    def retract(self, length: int) -> None:
        """Take back what was observed beyond so many ids, for nothing was sampled after it."""
        if self._turns and self._turns[-1].end > length:
            return
        self.ids.cut(length)
        del self._packed[length:], self._mask[length:], self._logprobs[length:]

    def sampled(self, completion: Completion, replica: str) -> None:
        """Append what the engine sampled after the stream as it stands; an aborted turn is continued by it.

        Raises:
            LLMError: a token id or a log-prob does not fit its column; nothing was appended.
        """
        start = len(self.ids)
        try:
            packed, logprobs = array("i", completion.token_ids), array("f", completion.logprobs)
        except (OverflowError, TypeError) as error:
            raise LLMError(f"replica {replica}: a token id or log-prob of its answer does not fit: {error}") from error
        self.ids += completion.token_ids
        self._packed += packed
        self._mask += b"\x01" * len(packed)
        self._logprobs += logprobs
        for span in completion.versions:
            self._add_span(VersionSpan(span.version, start + span.start, start + span.end))
        turn = Turn(start, len(self.ids), completion.finish_reason, replica, completion.cached_tokens, completion.llm_s)
        if self.cut_tokens:
            cut = self._turns.pop()
            turn = msgspec.structs.replace(
                turn, start=cut.start, cached_tokens=cut.cached_tokens, llm_s=cut.llm_s + turn.llm_s
            )
        self._turns.append(turn)

    def close(self, finish_reason: str) -> None:
        """End an aborted turn where it stands."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], finish_reason=finish_reason)

    def _add_span(self, span: VersionSpan) -> None:
        last = self._versions[-1] if self._versions else None
        if self.cut_tokens and last is not None and (last.version, last.end) == (span.version, span.start):
            self._versions[-1] = VersionSpan(last.version, last.start, span.end)
        else:
            self._versions.append(span)

    def spent_on_tools(self, seconds: float) -> None:
        """Charge tool time to the last turn."""
        if self._turns:
            last = self._turns[-1]
            self._turns[-1] = msgspec.structs.replace(last, tool_s=last.tool_s + seconds)

    @property
    def turns(self) -> int:
        """Generations so far; an aborted one that goes on is not counted yet."""
        return len(self._turns) - bool(self.cut_tokens)

    @property
    def cut_tokens(self) -> int:
        """Tokens of the aborted turn at the stream's end; 0 where its last turn is whole."""
        if not self._turns or self._turns[-1].finish_reason != ABORT:
            return 0
        return self._turns[-1].end - self._turns[-1].start

    @property
    def last_turn(self) -> tuple[list[int], str]:
        """Sampled ids and finish reason of the last turn."""
        turn = self._turns[-1]
        return self.ids[turn.start : turn.end], turn.finish_reason

    @property
    def last_cached_tokens(self) -> int:
        """Tokens before the last turn that the engine had."""
        return self._turns[-1].cached_tokens if self._turns else 0

    @property
    def sampled_tokens(self) -> int:
        """Tokens that an engine sampled."""
        return self._mask.count(1)

    def chain(self) -> Chain:
        """The chain as it stands; all per-token arrays have one length."""
        return Chain(
            self._prompt_length, self._packed.tobytes(), bytes(self._mask), self._logprobs.tobytes(),
            list(self._versions), list(self._turns),
        )  # fmt: skip
