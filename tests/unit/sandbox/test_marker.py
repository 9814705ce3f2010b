"""The marker is found wherever the stream is cut, and output stays bounded."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.marker import BoundedOutput, Marker, MarkerScanner, marker_start

NONCE = "0123456789abcdef"
START = marker_start(NONCE)


@given(output=st.binary(max_size=200), cwd=st.text(max_size=20), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_any_cutting_gives_the_same(output: bytes, cwd: str, cuts: list[int]) -> None:
    cwd = cwd.replace("\0", "") or "/"
    stream = output + START + b"7 " + cwd.encode() + b"\0"
    kept = BoundedOutput(1000)
    scanner = MarkerScanner(NONCE, kept)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    found = [scanner.feed(stream[begin:end]) for begin, end in pairwise(edges)]
    assert found[-1] == Marker(7, cwd) and not any(found[:-1])
    assert kept.text() == output.decode("utf-8", "replace")


@given(pieces=st.lists(st.sampled_from([b"\x1e", START[:5], START[:-1], b"x", b"\x1e\x1e", b"\0"]), max_size=30))
def test_what_only_begins_like_a_marker_is_output(pieces: list[bytes]) -> None:
    kept = BoundedOutput(10_000)
    scanner = MarkerScanner(NONCE, kept)
    assert [scanner.feed(piece) for piece in pieces] == [None] * len(pieces)
    scanner.flush()
    assert kept.text().encode() == b"".join(pieces)


def test_another_nonce_is_output() -> None:
    kept = BoundedOutput(1000)
    scanner = MarkerScanner(NONCE, kept)
    forged = marker_start("f" * 16) + b"0 /forged\0"
    assert scanner.feed(forged) is None
    assert scanner.feed(START + b"3 /real\0rest") == Marker(3, "/real")
    assert kept.text().encode() == forged


def test_a_marker_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        MarkerScanner(NONCE, BoundedOutput(10)).feed(START + b"no number\0")
    with pytest.raises(ValueError, match="no end"):
        MarkerScanner(NONCE, BoundedOutput(10)).feed(START + b"0 " + b"x" * 100_000)


@given(chunks=st.lists(st.binary(max_size=50), max_size=40), limit=st.integers(2, 60))
def test_head_and_tail_are_kept(chunks: list[bytes], limit: int) -> None:
    chunks = [bytes(byte & 0x7F for byte in chunk) for chunk in chunks]
    output = BoundedOutput(limit)
    for chunk in chunks:
        output.add(chunk)
    whole, half = b"".join(chunks), limit // 2
    assert output.truncated == (len(whole) > 2 * half)
    if not output.truncated:
        assert output.text() == whole.decode()
    else:
        missing = len(whole) - 2 * half
        expected = f"{whole[:half].decode()}\n[... {missing} bytes left out ...]\n{whole[-half:].decode()}"
        assert output.text() == expected


def test_memory_stays_bounded() -> None:
    output = BoundedOutput(1024)
    for _ in range(1000):
        output.add(b"x" * 65536)
    assert len(output._head) + len(output._tail) <= 1024 * 3
