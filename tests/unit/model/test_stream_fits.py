"""A stream takes only what the shards' columns can hold, whole or not at all."""

from __future__ import annotations

import msgspec
import pytest

from stages.dialects import DIALECTS, Dialect, UnreadableAnswerError
from stages.engine_client import Completion
from stages.engine_control import EngineControl, EngineControlError, _Version
from stages.errors import LLMError
from stages.stream import TokenStream


def test_an_id_that_does_not_fit_is_the_replicas_fault_and_leaves_the_stream_as_it_was() -> None:
    stream = TokenStream([1, 2])
    good = Completion([3, 4], [-0.5, -1.0], "stop", [], 0, 0.1)
    stream.sampled(good, "r0")
    before = stream.chain()
    with pytest.raises(LLMError, match="replica r0: a token id or log-prob of its answer does not fit"):
        stream.sampled(msgspec.structs.replace(good, token_ids=[5, 2**31]), "r0")
    assert stream.chain() == before and stream.ids == [1, 2, 3, 4]
    stream.observe([7])
    chain = stream.chain()
    assert (chain.token_ids, chain.loss_mask, chain.logprobs) == ([1, 2, 3, 4, 7], [0, 0, 1, 1, 0], [0, 0, -0.5, -1, 0])
    assert TokenStream.of(chain).chain() == chain


NONSENSE = [b'{"x": %s1%s}' % (b"[" * 100_000, b"]" * 100_000), b'{"choices": [{"token_ids": ["\xff"]}]}', b"\xff", b""]


@pytest.mark.parametrize("content", NONSENSE, ids=["nested", "no text", "no JSON", "nothing"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_an_answer_of_any_bytes_is_the_replicas_fault(dialect: Dialect, content: bytes) -> None:
    with pytest.raises(UnreadableAnswerError):
        dialect.read(content, 0.1)
    with pytest.raises(EngineControlError, match="not understood"):
        EngineControl._decode("http://r0", content.replace(b"choices", b"weight_version"), _Version)
