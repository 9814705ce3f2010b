"""Requests on their way: their sequences by the id that aborts them, run together, ended when their client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from stages.engine.answers import Texts
from stages.engine.bodies import SamplingFields, check_prompt, copies, stop_strings
from stages.engine.loop import EngineLoop
from stages.engine.sampling import SamplingParams
from stages.engine.sequence import Sequence
from stages.web import Request

_SPARE_TOKENS = 4


def request_id(prefix: str, request: Request, given: str | None) -> str:
    """The id that answers carry: the client's own behind the route's prefix, else a random one."""
    return f"{prefix}-{request.headers.get('x-request-id') or given or uuid4().hex[:16]}"


def _stops(texts: SequenceOf[str], tokenizer: Texts) -> Callable[[list[int]], str | None]:
    """A function from drawn ids to the stop string that they hold, if any."""
    # A token is at least a byte, so that so many hold any stop string that ends with the last of them.
    reach = max(len(text.encode()) for text in texts) + _SPARE_TOKENS

    def found(ids: list[int]) -> str | None:
        tail = tokenizer.decode(ids[-reach:])
        return next((text for text in texts if text in tail), None)

    return found


class Requests:
    """The requests of one engine.

    Args:
        loop: runs the sequences.
        tokenizer: finds stop strings.
        vocab_size: ids below it exist.
        max_model_len: tokens of prompt and answer together.
    """

    def __init__(self, loop: EngineLoop, tokenizer: Texts, vocab_size: int, max_model_len: int) -> None:
        self._loop, self._tokenizer = loop, tokenizer
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._open: dict[str, list[Sequence]] = {}

    def sequences(
        self, prompts: SequenceOf[list[int]], params: SamplingParams, fields: SamplingFields, salt: str | None
    ) -> list[Sequence]:
        """The sequences of a request, the copies of each prompt side by side.

        Raises:
            RequestError: a prompt that does not fit the model, or a field out of range.
        """
        texts = stop_strings(fields)
        stops = _stops(texts, self._tokenizer) if texts else None
        made = []
        for prompt in prompts:
            check_prompt(prompt, self._vocab_size, self._max_model_len)
            limit = min(params.max_tokens, self._max_model_len - len(prompt))
            made += [
                Sequence(prompt, params.of_copy(index), limit, salt or "", stops) for index in range(copies(fields))
            ]
        return made

    async def run(self, request: Request, name: str, sequences: SequenceOf[Sequence]) -> bool:
        """Run them all to their end; False when the client has gone, whose sequences are then aborted."""
        with self._registered(name, sequences):
            work = asyncio.gather(*(self._loop.generate(one) for one in sequences))
            # The body has been read: the next message of this connection is its end.
            gone = asyncio.ensure_future(request.receive())
            both: set[asyncio.Future[Any]] = {work, gone}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    return False
                work.result()
                return True
            finally:
                gone.cancel()
                work.cancel()

    async def stream(self, request: Request, name: str, sequence: Sequence) -> AsyncIterator[int]:
        """Run one; gives the number of its drawn tokens whenever there are more, and at the end. Closing it aborts."""
        sequence.streamed = True
        # Not left to the response, whose own watch is by cancelling a task that waits: ours hardly ever waits.
        watch = asyncio.create_task(self._abort_when_gone(request, sequence))
        try:
            with self._registered(name, [sequence]):
                async for drawn in self._loop.stream(sequence):
                    yield drawn
        finally:
            watch.cancel()

    async def _abort_when_gone(self, request: Request, sequence: Sequence) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._loop.abort(sequence)

    def abort(self, names: SequenceOf[str]) -> int:
        """End these where they stand, by their full ids; gives how many were still running."""
        found = [one for name in names for one in self._open.get(name, [])]
        return sum([self._loop.abort(one) for one in found])

    @contextmanager
    def _registered(self, name: str, sequences: SequenceOf[Sequence]) -> Iterator[None]:
        """Known by its id, and by those of vLLM's parts of it."""
        names = {name: list(sequences), **{f"{name}-{index}": [one] for index, one in enumerate(sequences)}}
        self._open.update(names)
        try:
            yield
        finally:
            for each in names:
                self._open.pop(each, None)
