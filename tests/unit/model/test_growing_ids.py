"""What an engine is sent of a stream that grew is what it would be sent of its ids encoded anew."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stages.dialects import COMPLETIONS, DIALECTS, SGLANG, VLLM, Completion, Ids
from stages.stream import TokenStream
from stages.trajectory import Sampling

FIELD = {VLLM: "token_ids", COMPLETIONS: "prompt", SGLANG: "input_ids"}
STEPS = st.lists(st.tuples(st.sampled_from(["add", "cut", "send"]), st.lists(st.integers(0, 200_000), max_size=4)))


@given(steps=STEPS, first=st.lists(st.integers(0, 200_000), max_size=4))
def test_the_json_of_ids_is_theirs_whatever_was_added_and_taken_back(
    steps: list[tuple[str, list[int]]], first: list[int]
) -> None:
    ids = Ids(first)
    for step, more in steps:
        if step == "add":
            ids += more
        elif step == "cut":
            ids.cut(max(0, len(ids) - len(more)))
        else:
            assert msgspec.json.decode(ids.json) == list(ids)
    for dialect in DIALECTS:
        sent = b"".join(dialect.body("name", "m", ids, Sampling()))
        assert sent == b"".join(dialect.body("name", "m", list(ids), Sampling()))
        assert msgspec.json.decode(sent)[FIELD[dialect]] == list(ids)


def test_what_a_stream_takes_back_is_not_sent_again() -> None:
    stream = TokenStream([1, 2])
    stream.observe([3, 4])
    assert bytes(stream.ids.json) == b"[1,2,3,4]"
    stream.retract(2)
    stream.observe([5])
    assert bytes(stream.ids.json) == b"[1,2,5]"
    stream.sampled(Completion([6], [-0.5], "stop", [], 0, 0.1), "replica-1")
    assert bytes(stream.ids.json) == b"[1,2,5,6]" and stream.ids == [1, 2, 5, 6]
