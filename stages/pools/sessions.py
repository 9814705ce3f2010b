"""An attempt's session with the fleet as its worker holds it: kept over turns, given up when the router says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from stages.engine_client import Completion, EngineUnavailableError
from stages.http import RouterLink
from stages.model import Sampler
from stages.trajectory import Sampling
from stages.wire import SessionIn, SessionOut


class AttemptSession:
    """Asks the router for the attempt's replica where it must, and samples from it.

    A session is asked for again after a failure, when the router has moved it, when it is meant for one turn only, and
    now and then so that the router knows it is in use. A generation on a replica that the router knows to be down is
    not waited for. Several chains of an attempt may generate at once.
    """

    def __init__(self, link: RouterLink, sampler: Sampler, rollout_id: str, attempt: int) -> None:
        self._link, self._sampler = link, sampler
        self._rollout_id, self._attempt = rollout_id, attempt
        self._session: SessionOut | None = None
        self._adapter: str | None = None
        self._asked_at = 0.0
        self._down = False
        self._generating: set[asyncio.Timeout] = set()

    def given(self, session: SessionOut) -> None:
        """The lease came with it."""
        self._session, self._adapter, self._asked_at = session, session.adapter, time.monotonic()

    def moved(self) -> None:
        """The router has another replica for the next turn."""
        self._session = None

    def lost(self) -> None:
        """The replica is down."""
        self._session, self._down = None, True
        for timeout in [one for one in self._generating if not one.expired()]:
            timeout.reschedule(0.0)

    async def open(self, failed: str | None) -> SessionOut:
        """The replica for the next generation; `failed` names one that has just not answered."""
        session = self._session
        if session is not None and failed is None and not session.once:
            recent = time.monotonic() - self._asked_at < session.ask_again_s
            if recent:
                return session
        body = SessionIn(rollout_id=self._rollout_id, attempt=self._attempt, failed=failed)
        self._down = False
        self._session = await self._link.call("POST", "/v1/sessions", body, answer=SessionOut)
        self._adapter = self._session.adapter
        self._asked_at = time.monotonic()
        return self._session

    async def context_length(self, url: str) -> int:
        """See EngineClient."""
        return await self._sampler.context_length(url)

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float, **more: Any
    ) -> Completion:
        """See EngineClient; of the adapter that the session names; given up when the replica is lost.

        Raises:
            EngineUnavailableError: also when the router says that the replica is down.
        """
        if self._adapter is not None:
            more = {"model": self._adapter, **more}
        down = f"replica {url}: the router says that it is down"
        if self._down:
            raise EngineUnavailableError(down)
        given_up = asyncio.timeout(None)
        try:
            async with given_up:
                self._generating.add(given_up)
                return await self._sampler.generate(url, token_ids, sampling, name=name, timeout_s=timeout_s, **more)
        except TimeoutError as error:
            if not given_up.expired():
                raise
            raise EngineUnavailableError(down) from error
        finally:
            self._generating.discard(given_up)
