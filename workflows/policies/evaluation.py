"""Samples a policy in the closed loop, many streams at once, and says how often it solves the task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.chat import ChatTokenizer
from workflows.policies.episodes import Play
from workflows.policies.network import Qwen3, new_cache

MAX_TURNS = 4
MAX_TURN_TOKENS = 64


def solved(model: Qwen3, chat: ChatTokenizer, rows: Sequence[Mapping[str, Any]], seed: int) -> list[bool]:
    """Play every row once at temperature 1 and say which were solved.

    All streams go forward one token a step, each at the same position: a stream that has given tokens left takes the
    next of them, the others sample. That wastes little, as the prompts are short and of nearly one length.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    plays = [Play(chat, row) for row in rows]
    given = [play.start() for play in plays]
    turns: list[list[int]] = [[] for _ in plays]
    alive = [True] * len(plays)
    positions = max(map(len, given)) + MAX_TURNS * (MAX_TURN_TOKENS + 32)
    cache = new_cache(len(plays), positions)
    ids = torch.tensor([stream.pop(0) for stream in given])
    for at in range(positions - 1):
        with torch.no_grad():
            probabilities = model.step(ids, cache, at).softmax(-1)
        ids = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        for index, play in enumerate(plays):
            if given[index]:
                ids[index] = given[index].pop(0)
            elif alive[index]:
                turns[index].append(int(ids[index]))
                alive[index] = _advance(play, turns[index], given[index], chat)
        if not any(alive):
            break
    return [play.solved and not running for play, running in zip(plays, alive, strict=True)]


def _advance(play: Play, turn: list[int], given: list[int], chat: ChatTokenizer) -> bool:
    """Take note of the newest token of `turn`; returns whether the stream goes on."""
    if turn[-1] not in chat.eos_ids:
        return len(turn) < MAX_TURN_TOKENS
    after = play.reply(turn, MAX_TURNS)
    turn.clear()
    given.extend(after or ())
    return after is not None


def interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    z = 1.96
    rate = successes / count
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def report(model: Qwen3, chat: ChatTokenizer, rows: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Success over all rows, over those with and without a file, and how often four tries at a row differ."""
    outcomes: list[bool] = []
    for start in range(0, len(rows), 256):
        outcomes += solved(model, chat, rows[start : start + 256], seed + start)
    low, high = interval(sum(outcomes), len(outcomes))
    kinds: dict[str, list[bool]] = {"plain": [], "file": []}
    for row, outcome in zip(rows, outcomes, strict=True):
        kinds["file" if "files" in row else "plain"].append(outcome)
    group_rows = [row for row in rows[:64] for _ in range(4)]
    tries = solved(model, chat, group_rows, seed - 1)
    groups = [sum(tries[start : start + 4]) for start in range(0, len(tries), 4)]
    return {
        "episodes": len(outcomes),
        "success": sum(outcomes) / len(outcomes),
        "low": low,
        "high": high,
        **{kind: sum(values) / max(1, len(values)) for kind, values in kinds.items()},
        "mixed_groups": sum(0 < group < 4 for group in groups) / len(groups),
    }
