"""Who may call what: bearer tokens with one role each, compared in constant time."""

from __future__ import annotations

import base64
import hmac
import secrets
from typing import Literal

from stages import sharedfs
from stages.errors import ServiceError
from stages.layout import RunLayout

Role = Literal["trainer", "worker"]


def make_secrets(layout: RunLayout) -> None:
    """Create the run's tokens and callback key where they are missing; mode 0600."""
    for path in (layout.trainer_token, layout.worker_token, layout.engine_token, layout.callback_key):
        if not sharedfs.exists(path):
            sharedfs.write_atomic(path, secrets.token_urlsafe(32).encode())


class Tokens:
    """The run's two bearer tokens."""

    def __init__(self, layout: RunLayout) -> None:
        self._tokens: dict[Role, bytes] = {
            "trainer": sharedfs.read_bytes(layout.trainer_token).strip(),
            "worker": sharedfs.read_bytes(layout.worker_token).strip(),
        }

    def check(self, header: str | None, allowed: frozenset[Role]) -> None:
        """Let a request pass.

        Raises:
            ServiceError: 401 without a known token, 403 with the other role's.
        """
        scheme, given = _given(header or "")
        role: Role | None = None
        for name, expected in self._tokens.items():
            # Every token is compared, so that the time taken says nothing about which one was close.
            if hmac.compare_digest(given, expected):
                role = name
        if scheme not in {"bearer", "basic"} or role is None:
            raise ServiceError(401, "unauthorized", "Authorization: Bearer with a token of secrets/ is needed")
        if role not in allowed:
            wanted = " or ".join(sorted(allowed))
            raise ServiceError(403, "wrong_role", f"this route is for the {wanted}'s token, not the {role}'s")


def _given(header: str) -> tuple[str, bytes]:
    """Scheme and token. Basic's password is the token too: some clients can be given an address and nothing else."""
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "basic":
        return scheme.lower(), token.strip().encode(errors="replace")
    try:
        return "basic", base64.b64decode(token, validate=True).partition(b":")[2]
    except ValueError:
        return "basic", b""
