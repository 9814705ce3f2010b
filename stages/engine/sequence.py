"""One request on its way through the engine: its tokens, what was drawn, and what of it is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from stages.engine.sampling import Drawn, SamplingParams, new_generator

FinishReason = Literal["stop", "length", "abort"]


class WeightSpan(msgspec.Struct):
    """Weights of `version` drew the answer's tokens [start, end)."""

    version: str
    start: int
    end: int


@dataclass(eq=False)
class Sequence:
    """Tokens, draws and room of one request; the scheduler writes everything below `salt`.

    Args:
        prompt: token ids, at least one.
        params: how it is sampled.
        limit: tokens of the longest answer that fits both the request and the model.
        salt: sequences of different salts share no blocks.
        stops: says of the tokens drawn so far which stop string they hold; None where there is none.
    """

    prompt: list[int]
    params: SamplingParams
    limit: int
    salt: str = ""
    stops: Callable[[list[int]], str | None] | None = None
    drawn: list[Drawn] = field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    versions: list[WeightSpan] = field(default_factory=list)
    generator: np.random.Generator = field(init=False)
    tokens: list[int] = field(init=False)
    streamed: bool = False
    computed: int = 0
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = new_generator(self.params.seed)
        self.tokens = list(self.prompt)

    def note_version(self, version: str) -> None:
        """Say of the last drawn token which weights drew it."""
        end = len(self.drawn)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1].end = end
        else:
            self.versions.append(WeightSpan(version, end - 1, end))

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not stored yet; 1 means that the next step decodes it."""
        return len(self.tokens) - self.computed
