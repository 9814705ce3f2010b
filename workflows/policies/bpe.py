"""Trains a small byte-level BPE vocabulary and gives it as the content of a tokenizer.json."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\p{L}\p{N}\r\n]+[\r\n]*|[\r\n]+"
"""How text is split before merging: a word takes one character before it, digits stand alone so that numbers are
copied digit by digit, and a run of punctuation may hold spaces, so that JSON costs few tokens."""

_ASCII_PIECES = re.compile(r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]|[^A-Za-z0-9\r\n]+[\r\n]*|[\r\n]+")
"""The same for ASCII: the standard library's regular expressions know no Unicode classes."""


def train(texts: Iterable[str], vocab_size: int) -> dict[str, Any]:
    """Learn merges from ASCII `texts` until the vocabulary has `vocab_size` entries.

    The method is Sennrich et al. 2016 (arXiv:1508.07909) over bytes: merge the most frequent neighbours, again and
    again; ties go to the pair that sorts first, so equal texts give equal files.
    """
    alphabet = byte_characters()
    words: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        for part in re.split("|".join(map(re.escape, SPECIAL + TOOL_TAGS)), text):
            for piece in _ASCII_PIECES.findall(part):
                words[tuple(alphabet[byte] for byte in piece.encode())] += 1
    entries = [*SPECIAL, *TOOL_TAGS, *sorted(alphabet)]
    merges = _learn(words, vocab_size - len(entries))
    entries += ["".join(pair) for pair in merges]
    return _tokenizer_json({entry: index for index, entry in enumerate(entries)}, merges)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    spare = iter(range(256, 512))
    return [table[byte] if byte in table else chr(next(spare)) for byte in range(256)]


def _learn(words: Counter[tuple[str, ...]], count: int) -> list[tuple[str, str]]:
    known = {"".join(word) for word in words if len(word) == 1}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        # Two ways to one entry would give it two ids.
        fresh = {pair: times for pair, times in pairs.items() if "".join(pair) not in known}
        if not fresh:
            break
        best = min(fresh, key=lambda pair: (-fresh[pair], pair))
        merges.append(best)
        known.add("".join(best))
        words = _merged(words, best)
    return merges


def _merged(words: Counter[tuple[str, ...]], pair: tuple[str, str]) -> Counter[tuple[str, ...]]:
    left, right = pair
    result: Counter[tuple[str, ...]] = Counter()
    for word, times in words.items():
        if left not in word or right not in word:
            result[word] += times
            continue
        joined: list[str] = []
        position = 0
        while position < len(word):
            if word[position : position + 2] == pair:
                joined.append(left + right)
                position += 2
            else:
                joined.append(word[position])
                position += 1
        result[tuple(joined)] += times
    return result


def _tokenizer_json(vocab: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _PIECES}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[token], "content": token, **flags, "special": token in SPECIAL}
            for token in SPECIAL + TOOL_TAGS
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
