"""The engine's routes: vLLM's wire format in front of an engine loop."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from stages.engine.answers import (
    VLLM_VERSION,
    Decoder,
    completion_answer,
    error_answer,
    generate_answer,
    model_list,
)
from stages.engine.bodies import (
    CompletionRequest,
    GenerateRequest,
    TokenizeRequest,
    check_prompt,
    decode_body,
    empty_token_ids,
    refuse_unsupported,
    sampling_params,
)
from stages.engine.errors import RequestError
from stages.engine.loop import EngineLoop
from stages.engine.metrics import render_metrics
from stages.engine.sampling import SamplingParams
from stages.engine.sequence import Sequence
from stages.errors import StageError
from stages.web import (
    ASGIApp,
    ClientDisconnect,
    HTTPException,
    Receive,
    Request,
    Response,
    Route,
    Scope,
    Send,
    Starlette,
)

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM's api key guards; the rest is open there too."""


class Tokenizer(Protocol):
    """What the server asks of a tokenizer (`stages.chat.ChatTokenizer` is the real one)."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added."""
        ...

    def decode(self, ids: SequenceOf[int]) -> str:
        """Text of ids, special tokens kept."""
        ...

    def token(self, token_id: int) -> str:
        """The vocabulary's spelling of an id."""
        ...

    def render(
        self,
        messages: SequenceOf[Mapping[str, Any]],
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat template's text of messages."""
        ...


class Served(msgspec.Struct, frozen=True):
    """What is served: the name clients use, where it came from, its bounds, and the version of its weights."""

    model: str
    root: str
    vocab_size: int
    max_model_len: int
    weight_version: str
    special_ids: frozenset[int]
    created: int


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(error_answer(error), error.status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"detail": error.detail}, error.status_code)


async def _client_gone(_: Request, __: Exception) -> Response:
    """Nobody reads it: 499 is for the log alone."""
    return Response(status_code=499)


class _Routes:
    """The handlers, over one loop, one tokenizer and one model."""

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer, served: Served) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._served = served
        self._decoder = Decoder(tokenizer, served.special_ids)

    async def generate(self, request: Request) -> Response:
        """POST /inference/v1/generate."""
        body = decode_body(await request.body(), GenerateRequest)
        self._check_model(body.model)
        if not body.token_ids:
            raise empty_token_ids()
        refuse_unsupported(body)
        if body.output_mode not in ("tokens", "text"):
            raise RequestError(f"output_mode must be tokens or text, got {body.output_mode}", param="output_mode")
        params = sampling_params(body.sampling_params)
        done = await self._run(request, body.token_ids, params, body.cache_salt)
        if done is None:
            return Response(status_code=499)
        return _json(
            generate_answer(
                done,
                request_id=_request_id("generate-tokens", request, body.request_id),
                model=self._served.model,
                created=int(time.time()),
                weight_version=self._served.weight_version,
                echo_prompt=bool(body.return_token_ids),
                decoder=self._decoder if body.output_mode == "text" else None,
            )
        )

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = decode_body(await request.body(), CompletionRequest)
        self._check_model(body.model)
        prompt = self._tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        if not prompt:
            raise RequestError("You must pass at least one prompt")
        done = await self._run(request, prompt, sampling_params(body), body.cache_salt)
        if done is None:
            return Response(status_code=499)
        return _json(
            completion_answer(
                done,
                request_id=_request_id("cmpl", request, body.request_id),
                model=self._served.model,
                created=int(time.time()),
                decoder=self._decoder,
                with_ids=bool(body.return_token_ids),
                tokens_as_ids=bool(body.return_tokens_as_token_ids),
            )
        )

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = decode_body(await request.body(), TokenizeRequest)
        self._check_model(body.model)
        text = body.prompt
        if body.messages is not None:
            try:
                text = self._tokenizer.render(body.messages, body.tools, body.add_generation_prompt)
            except StageError as error:
                raise RequestError(str(error), param="messages") from error
        if text is None:
            raise RequestError("give a prompt or messages", param="prompt")
        ids = self._tokenizer.encode(text)
        return _json(
            {
                "count": len(ids),
                "max_model_len": self._served.max_model_len,
                "tokens": ids,
                "token_strs": [self._tokenizer.token(one) for one in ids] if body.return_token_strs else None,
            }
        )

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        served = self._served
        return _json(model_list(served.model, served.root, served.created, served.max_model_len))

    async def health(self, _: Request) -> Response:
        """GET /health: the loop that answers is the loop that steps, so an answer is health."""
        return Response()

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return _json({"version": VLLM_VERSION})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        text = render_metrics(self._loop.scheduler, self._served.model)
        return Response(text, media_type="text/plain; version=0.0.4")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.model:
            raise RequestError(
                f"The model `{name}` does not exist. Valid aliases: {self._served.model}.",
                status=404,
                kind="NotFoundError",
                param="model",
            )

    async def _run(
        self, request: Request, prompt: list[int], params: SamplingParams, salt: str | None
    ) -> Sequence | None:
        """Generate; None when the client has gone, whose sequence is then aborted."""
        check_prompt(prompt, self._served.vocab_size, self._served.max_model_len)
        limit = min(params.max_tokens, self._served.max_model_len - len(prompt))
        sequence = Sequence(prompt=prompt, params=params, limit=limit, salt=salt or "")
        work = asyncio.ensure_future(self._loop.generate(sequence))
        # The body has been read: the next message of this connection is its end.
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else None
        finally:
            gone.cancel()
            work.cancel()


def _request_id(prefix: str, request: Request, given: str | None) -> str:
    return f"{prefix}-{request.headers.get('x-request-id') or given or uuid4().hex[:16]}"


class _BearerGate:
    """Demands the api key on the paths that vLLM guards."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 in place of the application where the key is missing or wrong."""
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _json({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(loop: EngineLoop, tokenizer: Tokenizer, served: Served, api_key: str | None = None) -> ASGIApp:
    """The application over a running engine loop.

    Args:
        loop: whose `run` the caller keeps running.
        tokenizer: the model's.
        served: what is served.
        api_key: demanded as a bearer token where vLLM demands it; None leaves every route open.
    """
    routes = _Routes(loop, tokenizer, served)
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", routes.generate, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
        ],
        exception_handlers={RequestError: _refused, HTTPException: _http_error, ClientDisconnect: _client_gone},
    )
    return app if api_key is None else _BearerGate(app, api_key)
