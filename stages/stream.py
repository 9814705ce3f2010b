"""The token stream of a chain: sampled tokens and observations appended, nothing ever decoded and encoded again."""

from __future__ import annotations

from collections.abc import Sequence

from stages.engine_client import Completion
from stages.trajectory import Chain, Turn, VersionSpan


class TokenStream:
    """One chain being built. `ids` is the whole stream; its next prompt is the stream itself."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = list(prompt)
        self._prompt_length = len(prompt)
        self._mask = [0] * len(prompt)
        self._logprobs = [0.0] * len(prompt)
        self._versions: list[VersionSpan] = []
        self._turns: list[Turn] = []

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that nobody sampled: mask 0, log-prob 0."""
        self.ids += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def sampled(self, completion: Completion, replica: str) -> None:
        """Append what the engine sampled after the stream as it stands."""
        start = len(self.ids)
        self.ids += completion.token_ids
        self._mask += [1] * len(completion.token_ids)
        self._logprobs += completion.logprobs
        for span in completion.versions:
            self._add_span(VersionSpan(span.version, start + span.start, start + span.end))
        self._turns.append(
            Turn(start, len(self.ids), completion.finish_reason, replica, completion.cached_tokens, completion.llm_s)
        )

    def _add_span(self, span: VersionSpan) -> None:
        self._versions.append(span)

    def spent_on_tools(self, seconds: float) -> None:
        """Charge tool time to the last turn."""
        if self._turns:
            last = self._turns[-1]
            self._turns[-1] = Turn(
                last.start, last.end, last.finish_reason, last.replica, last.cached_tokens, last.llm_s,
                last.tool_s + seconds,
            )  # fmt: skip

    @property
    def turns(self) -> int:
        """Generations so far."""
        return len(self._turns)

    def chain(self) -> Chain:
        """The chain as it stands; all per-token lists have one length."""
        return Chain(
            self._prompt_length, list(self.ids), list(self._mask), list(self._logprobs), list(self._versions),
            list(self._turns),
        )  # fmt: skip
