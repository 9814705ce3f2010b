"""The gateway for an agent that runs in no sandbox; the end of its block tells what the rollout ended with."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec

from stages.gateway.server import CAPABILITY, GatewayServer, opened
from stages.gateway.session import CaptureSession
from stages.model import StreamModel


@contextlib.asynccontextmanager
async def outside(model: StreamModel, *, max_turns: int, host: str = "127.0.0.1") -> AsyncIterator[Outside]:
    """A gateway for an agent that runs in no sandbox: on an interface of this node, under a capability path.

    Args:
        model: of the attempt.
        max_turns: answers at most.
        host: an address of this node; whoever reaches it and knows the path can ask the policy while the block runs.

    Raises:
        LLMError: at the block's end, as all of these: the fleet did not answer.
        PolicyTimeoutError: more than `max_turns` answers were asked for.
        ContextLengthError: the last request was too long for the context.
    """
    session = CaptureSession(model, max_turns=max_turns)
    async with GatewayServer() as server, opened(server, session):
        sock = socket.create_server((host, 0))
        sock.setblocking(False)
        port = await server.listen(sock)
        try:
            yield Outside(f"http://{host}:{port}{CAPABILITY}{session.token}", session)
        except Exception as error:  # often the client's own, about what the session knows better
            if (ended := session.end()) is not None:
                raise ended from error
            raise
        if (ended := session.end()) is not None:
            raise ended


class Outside(msgspec.Struct, frozen=True):
    """Where an agent outside finds the policy: OpenAI's base URL is `url` + "/v1", Anthropic's is `url`; no key."""

    url: str
    session: CaptureSession
