"""Continuous batching: which sequences run, what each step computes, who gives way when room for keys and values ends.

One `step()` is one decode of every running sequence whose prompt is stored, plus chunks of prompts up to a bound of
tokens. When the blocks run out, the sequence that came last gives up its own and waits to be computed again (its
tokens and its generator are kept, so the outcome is the same). No clock, no asyncio: `loop.py` calls `step()` and
passes on what it returns.

The rows of the store are kept dense: running sequences have rows 0..n-1, and the last one moves into a row that falls
free, so that a decode step sees a slice and copies nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from stages.engine.errors import EngineError
from stages.engine.kvcache import BlockPool, KVStore, block_digests
from stages.engine.qwen3 import Qwen3, Rows
from stages.engine.sampling import Drawn, LogprobsMode, draw, score_tokens
from stages.engine.sequence import Sequence
from stages.engine.weights import F32


class SchedulerOptions(msgspec.Struct, frozen=True):
    """Bounds of the engine.

    Args:
        max_model_len: tokens of the longest sequence, prompt and answer.
        max_num_seqs: sequences that run at once; others wait.
        max_num_batched_tokens: tokens a step computes at most, so that a long prompt cannot hold up those who decode.
        block_size: tokens in a block of the prefix cache.
        kv_cache_tokens: tokens that all sequences and the prefix cache hold together.
        enable_prefix_caching: off recomputes every prompt.
        logprobs_mode: the distribution whose log-probs are reported.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_tokens: int = 65_536
    enable_prefix_caching: bool = True
    logprobs_mode: LogprobsMode = "processed_logprobs"


@dataclass
class Counters:
    """What the engine has done since its start; names follow vLLM's metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns the model, the cache and the queues; single-threaded.

    Args:
        model: the loaded model.
        options: bounds.
        eos_ids: tokens that end an answer; the model config's by default.
        weight_version: what the answers say of these weights.

    Raises:
        EngineError: bounds that the model or each other forbid.
    """

    def __init__(
        self,
        model: Qwen3,
        options: SchedulerOptions,
        eos_ids: frozenset[int] | None = None,
        weight_version: str = "default",
    ) -> None:
        _check_options(model, options)
        self.weight_version = weight_version
        self._eos_ids = model.config.eos_token_ids if eos_ids is None else eos_ids
        self.options = options
        self.counters = Counters()
        self._model = model
        blocks = options.kv_cache_tokens // options.block_size
        self._pool = BlockPool(blocks)
        rows = model.new_rows(options.max_num_seqs, options.max_model_len)
        self._store = KVStore(rows, blocks, options.block_size)
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._by_row: list[Sequence] = []

    @property
    def running(self) -> int:
        """Sequences that hold a row."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a row or for blocks."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Blocks owned by running sequences, as a fraction."""
        return self._pool.usage

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its prompt and limit must fit `max_model_len` (checked where the request is read)."""
        if len(sequence.prompt) + 1 > self.options.max_model_len:
            raise EngineError(
                f"a prompt of {len(sequence.prompt)} tokens is too long for max_model_len={self.options.max_model_len}"
            )
        self.counters.prompt_tokens += len(sequence.prompt)
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence where it stands and free what it holds; False when it has ended already."""
        if sequence.finish_reason is not None:
            return False
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._drop(sequence)
        sequence.finish_reason = "abort"
        return True

    def replace_model(self, model: Qwen3) -> None:
        """Draw from other weights from the next step on; what is stored of the old ones stays until it is reset.

        Raises:
            EngineError: another architecture than the one that is served.
        """
        if model.config != self._model.config or model.max_len != self._model.max_len:
            raise EngineError("the new weights are of another config than the served ones; start a new replica")
        self._model = model

    def score(self, prompt: list[int], count: int) -> list[Drawn]:
        """Log-probs of a prompt's tokens after the first under the model alone, with the `count` best beside each."""
        return score_tokens(self._model.logits(prompt)[:-1], prompt[1:], count)

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Forget every stored block; False, with nothing forgotten, while sequences own some.

        Args:
            running: make the running sequences give theirs up: they are computed again before they go on.
        """
        if self._running and not running:
            return False
        while self._running:
            self._preempt(self._running[-1])
        for one in self._waiting:
            one.computed, one.digests = 0, []
        self._pool.forget_all()
        return True

    def step(self) -> list[Sequence]:
        """Compute once; gives the sequences that got a token, those that ended among them."""
        preemptions = self.counters.preemptions
        chunks = self._plan_running()
        if self.counters.preemptions == preemptions:
            # A step that preempted takes nobody in: the newcomer would be the next to be preempted.
            self._admit(chunks)
        decoding = sorted((one for one in chunks if one.pending == 1), key=lambda one: one.row)
        prefilling = [one for one in chunks if one.pending > 1]
        ready: list[Sequence] = []
        logits: list[F32] = []
        if decoding:
            logits.append(self._decode(decoding))
            ready += decoding
        for one in prefilling:
            last = self._prefill(one, chunks[one])
            if one.pending == 0:
                logits.append(last)
                ready.append(one)
        if ready:
            self._sample(ready, logits[0] if len(logits) == 1 else np.concatenate(logits))
        return ready

    def _plan_running(self) -> dict[Sequence, int]:
        """Tokens that each running sequence computes in this step; preempts from the end until all have blocks."""
        budget = self.options.max_num_batched_tokens
        chunks: dict[Sequence, int] = {}
        index = 0
        while index < len(self._running):
            one = self._running[index]
            count = min(one.pending, max(1, budget))
            if not self._reserve(one, one.computed + count):
                self._preempt(self._running[-1])
                continue
            chunks[one] = count
            budget -= count
            index += 1
        return chunks

    def _admit(self, chunks: dict[Sequence, int]) -> None:
        budget = self.options.max_num_batched_tokens - sum(chunks.values())
        while self._waiting and budget > 0 and len(self._running) < self.options.max_num_seqs:
            one = self._waiting[0]
            self._take_cached(one)
            count = min(one.pending, budget)
            if not self._reserve(one, one.computed + count):
                self._pool.release(one.blocks)
                one.blocks = []
                return
            self._waiting.popleft()
            if one.cached_tokens is None:
                one.cached_tokens = one.computed
                self.counters.prefix_cache_queries += len(one.prompt)
                self.counters.prefix_cache_hits += one.computed
            one.row = len(self._by_row)
            self._by_row.append(one)
            self._running.append(one)
            self._store.load(one.row, one.blocks[: one.computed // self.options.block_size])
            chunks[one] = count
            budget -= count

    def _take_cached(self, one: Sequence) -> None:
        """Own the stored beginning of a sequence; its last token is always computed, for its logits are needed."""
        one.blocks, one.computed = [], 0
        if not self.options.enable_prefix_caching:
            return
        size = self.options.block_size
        one.digests = block_digests(one.tokens, size, salt=one.salt, known=one.digests)
        one.blocks = self._pool.match(one.digests[: (len(one.tokens) - 1) // size])
        one.computed = len(one.blocks) * size

    def _reserve(self, one: Sequence, tokens: int) -> bool:
        missing = -(-tokens // self.options.block_size) - len(one.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        one.blocks += blocks
        return True

    def _decode(self, decoding: list[Sequence]) -> F32:
        first, last = decoding[0].row, decoding[-1].row
        dense = last - first + 1 == len(decoding)
        which: Rows = slice(first, last + 1) if dense else np.array([one.row for one in decoding])
        logits = self._model.decode(
            np.array([one.tokens[-1] for one in decoding]),
            np.array([one.computed for one in decoding]),
            self._store.rows,
            which,
        )
        for one in decoding:
            self._advance(one, 1)
        return logits

    def _prefill(self, one: Sequence, count: int) -> F32:
        chunk = np.array(one.tokens[one.computed : one.computed + count])
        logits = self._model.prefill(chunk, one.computed, self._store.rows, one.row)
        self._advance(one, count)
        return logits

    def _advance(self, one: Sequence, count: int) -> None:
        """Note stored tokens, and save the blocks that are full now."""
        size = self.options.block_size
        before, one.computed = one.computed // size, one.computed + count
        full = one.computed // size
        if full == before or not self.options.enable_prefix_caching:
            return
        one.digests = block_digests(one.tokens[: full * size], size, salt=one.salt, known=one.digests[:full])
        for index in range(before, full):
            block = one.blocks[index]
            kept = self._pool.publish(block, one.digests[index])
            if kept == block:
                self._store.save(one.row, index * size, block)
            one.blocks[index] = kept

    def _sample(self, ready: list[Sequence], logits: F32) -> None:
        drawn = draw(
            logits, [one.params for one in ready], [one.generator for one in ready], self.options.logprobs_mode
        )
        self.counters.generation_tokens += len(ready)
        for one, result in zip(ready, drawn, strict=True):
            token = result.chosen.token_id
            one.drawn.append(result)
            one.tokens.append(token)
            one.note_version(self.weight_version)
            if token in one.params.stop_token_ids:
                one.finish_reason, one.stop_reason = "stop", token
            elif token in self._eos_ids and not one.params.ignore_eos:
                one.finish_reason = "stop"
            elif one.stops is not None and (found := one.stops(one.tokens[len(one.prompt) :])) is not None:
                one.finish_reason, one.stop_reason = "stop", found
            elif len(one.drawn) >= one.limit:
                one.finish_reason = "length"
            if one.finish_reason is not None:
                self._drop(one)

    def _preempt(self, one: Sequence) -> None:
        self._drop(one)
        self._waiting.appendleft(one)
        self.counters.preemptions += 1

    def _drop(self, one: Sequence) -> None:
        """Free a running sequence's blocks and row, and close the gap."""
        self._running.remove(one)
        self._pool.release(one.blocks)
        one.blocks = []
        mover = self._by_row.pop()
        if mover is not one:
            self._store.move(mover.row, one.row, mover.computed)
            mover.row = one.row
            self._by_row[one.row] = mover
        one.row = -1


def _check_options(model: Qwen3, options: SchedulerOptions) -> None:
    if options.max_model_len > model.max_len:
        raise EngineError(
            f"max_model_len={options.max_model_len} is above what the model was made for "
            f"({model.max_len} positions); lower max_model_len"
        )
    if options.kv_cache_tokens // options.block_size * options.block_size < options.max_model_len:
        raise EngineError(
            f"kv_cache_tokens={options.kv_cache_tokens} cannot hold one sequence of "
            f"max_model_len={options.max_model_len}; raise the first or lower the second"
        )
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        if getattr(options, name) < 1:
            raise EngineError(f"{name}={getattr(options, name)} must be at least 1")
