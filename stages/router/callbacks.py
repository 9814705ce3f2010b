"""Callbacks: each closed group that asked for one is told to its trainer, signed, until it is taken or given up.

What is still to be told is part of the ledger, so a router that takes over goes on where the last one stopped. A
callback may arrive twice (a router died between the answer and the journal): `seq` and `group_id` tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from stages import sharedfs
from stages.errors import JournalError, ServiceError
from stages.http import Client, InvalidURL, TransportError
from stages.ledger.events import CalledBack
from stages.ledger.state import Callback
from stages.router.core import Router

SIGNATURE: Final = "X-Rollmill-Signature"
ANSWER_S: Final = 10.0
AT_ONCE: Final = 32
BACKOFF_S: Final = (0.5, 60.0)
GIVEN_UP_S: Final = 3600.0
"""From the group's end on; what was not told by then is found by polling alone."""
LOOK_S: Final = 0.2

log = logging.getLogger(__name__)


def sign(key: bytes, body: bytes) -> str:
    """The signature header's value: HMAC-SHA256 of the body, in hexadecimal."""
    return "sha256=" + hmac.new(key, body, hashlib.sha256).hexdigest()


def is_allowed(url: str, prefixes: Sequence[str]) -> bool:
    """Whether a URL lies below one of the allowed ones: same scheme, host and port, and a path that begins with theirs.

    A path that could mean another one (`..`, also in percent signs, or a backslash) is never allowed, nor is a name
    and password.
    """
    given = _parts(url)
    return given is not None and any(_below(given, _parts(prefix)) for prefix in prefixes)


_Parts = tuple[str, str, int, str]


def _parts(url: str) -> _Parts | None:
    if any(character <= " " or character == "\\" or character == "\x7f" for character in url):
        return None
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        return None
    if split.scheme not in {"http", "https"} or not split.hostname or "@" in split.netloc:
        return None
    path = split.path or "/"
    if ".." in unquote(unquote(path)).replace("\\", "/").split("/"):
        return None
    return split.scheme, split.hostname, port or (443 if split.scheme == "https" else 80), path


def _below(given: _Parts, allowed: _Parts | None) -> bool:
    if allowed is None or given[:3] != allowed[:3]:
        return False
    path = allowed[3].rstrip("/")
    return given[3] == path or given[3].startswith(path + "/")


class Callbacks:
    """Tells trainers. `run` goes on until cancelled."""

    def __init__(self, router: Router, allow: Sequence[str], *, given_up_s: float = GIVEN_UP_S) -> None:
        self._router, self._allow, self._given_up_s = router, list(allow), given_up_s
        self._key = sharedfs.read_bytes(router.layout.callback_key).strip()
        self._tries: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._over: dict[str, str] = {}

    def check(self, url: str | None) -> None:
        """Refuse a submission whose callback could go nowhere.

        Raises:
            ServiceError: 400, not below any prefix of callbacks.allow.
        """
        if url is None or is_allowed(url, self._allow):
            return
        places = ", ".join(self._allow) or "none"
        message = f"callback_url: {url[:200]!r} is not below callbacks.allow ({places}): add its prefix to the config"
        raise ServiceError(400, "invalid", message, field="callback_url")

    async def run(self) -> None:
        """Tell what is to be told, a few at a time; the ledger holds what is left."""
        async with Client(connections=AT_ONCE, timeout_s=ANSWER_S) as client:
            telling: dict[str, asyncio.Task[None]] = {}
            try:
                while True:
                    for group_id, callback in self._due(telling):
                        telling[group_id] = asyncio.create_task(self._tell(client, group_id, callback))
                    await asyncio.sleep(LOOK_S)
                    telling = {group_id: task for group_id, task in telling.items() if not task.done()}
                    await self._settle()
            finally:
                for task in telling.values():
                    task.cancel()
                await asyncio.gather(*telling.values(), return_exceptions=True)

    def _due(self, telling: dict[str, asyncio.Task[None]]) -> list[tuple[str, Callback]]:
        room, now, due = AT_ONCE - len(telling), time.monotonic(), list[tuple[str, Callback]]()
        for group_id, callback in self._router.ledger.state.callbacks.items():
            if len(due) >= room:
                break
            published = callback.seq <= self._router.publisher.published
            busy = group_id in telling or group_id in self._over
            if published and not busy and self._not_before.get(group_id, 0.0) <= now:
                due.append((group_id, callback))
        return due

    async def _tell(self, client: Any, group_id: str, callback: Callback) -> None:
        problem = await self._post(client, group_id, callback)
        if problem is None:
            self._over[group_id] = ""
        elif self._router.clock() - callback.since > self._given_up_s:
            self._over[group_id] = problem
            log.warning("callback of %s given up: %s", group_id, problem)
        else:
            tries = self._tries[group_id] = self._tries.get(group_id, 0) + 1
            pause_s = min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** (tries - 1))
            self._not_before[group_id] = time.monotonic() + pause_s

    async def _post(self, client: Any, group_id: str, callback: Callback) -> str | None:
        """What is wrong, or None where it was taken. A redirect is not followed: it would leave the allowed place."""
        if not is_allowed(callback.url, self._allow):  # the config may have changed since it was accepted
            return "not below callbacks.allow any more"
        publisher = self._router.publisher
        line = await publisher.line(callback.seq)
        seqs = [publisher.seq_of_rollout(rollout_id) for rollout_id in line["rollout_ids"]]
        rows = [await publisher.line(seq) for seq in seqs if seq is not None]
        body = msgspec.json.encode({"run_id": self._router.run_id, "group": line, "rows": rows})
        headers = {"Content-Type": "application/json", SIGNATURE: sign(self._key, body)}
        try:
            answer = await client.post(callback.url, content=body, headers=headers)
        except (TransportError, InvalidURL, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None if 200 <= answer.status_code < 300 else f"answered {answer.status_code}"

    async def _settle(self) -> None:
        if not self._over:
            return
        over, self._over = self._over, {}
        failed = {group_id: problem for group_id, problem in over.items() if problem}
        with contextlib.suppress(JournalError):  # it stands in the journal's queue, or this epoch is over
            await self._router.submit(CalledBack(t=self._router.clock(), groups=list(over), failed=failed))
        for group_id in over:
            self._tries.pop(group_id, None)
            self._not_before.pop(group_id, None)
