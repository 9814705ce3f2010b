"""The engine's routes: vLLM's wire format in front of an engine loop."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import msgspec

from stages.engine.admin import Admin
from stages.engine.answers import (
    VLLM_VERSION,
    Answer,
    Decoder,
    completion_answer,
    error_answer,
    generate_answer,
    model_list,
)
from stages.engine.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
    chat_params,
    copies,
    decode_body,
    empty_token_ids,
    sampling_params,
)
from stages.engine.chats import chat_answer, template_messages
from stages.engine.errors import RequestError
from stages.engine.loop import EngineLoop
from stages.engine.metrics import render_metrics
from stages.engine.requests import Requests, request_id
from stages.engine.sequence import Sequence
from stages.engine.streams import MEDIA_TYPE, chat_events, completion_events, generate_events
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
    StreamingResponse,
)

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Answered without the key: what is asked by those who hold none."""


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
    """What is served: the name clients use, where it came from, and its bounds."""

    model: str
    root: str
    vocab_size: int
    max_model_len: int
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

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer, served: Served, requests: Requests) -> None:
        self._loop, self._tokenizer, self._served, self._requests = loop, tokenizer, served, requests
        self._decoder = Decoder(tokenizer, served.special_ids)

    async def generate(self, request: Request) -> Response:
        """POST /inference/v1/generate."""
        body = decode_body(await request.body(), GenerateRequest)
        self._check_model(body.model)
        if not body.token_ids:
            raise empty_token_ids()
        if body.output_mode not in ("tokens", "text"):
            raise RequestError(f"output_mode must be tokens or text, got {body.output_mode}", param="output_mode")
        fields, params = body.sampling_params, sampling_params(body.sampling_params)
        sequences = self._requests.sequences([body.token_ids], params, fields, body.cache_salt)
        name = request_id("generate-tokens", request, body.request_id)
        about = self._about(
            name, fields, sequences, with_ids=bool(body.return_token_ids), as_text=body.output_mode == "text"
        )
        events = (generate_events, body.stream_options) if body.stream else None
        return await self._answer(request, sequences, about, generate_answer, events)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = decode_body(await request.body(), CompletionRequest)
        self._check_model(body.model)
        sequences = self._requests.sequences(self._prompts(body), sampling_params(body), body, body.cache_salt)
        about = self._about(
            request_id("cmpl", request, body.request_id), body, sequences,
            with_ids=bool(body.return_token_ids), as_ids=bool(body.return_tokens_as_token_ids),
        )  # fmt: skip
        events = (completion_events, body.stream_options) if body.stream else None
        return await self._answer(request, sequences, about, completion_answer, events)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = decode_body(await request.body(), ChatRequest)
        self._check_model(body.model)
        prompt = self._tokenizer.encode(self._render(body.messages, body.tools, body.add_generation_prompt))
        params = chat_params(body, self._served.max_model_len - len(prompt))
        sequences = self._requests.sequences([prompt], params, body, body.cache_salt)
        about = self._about(
            request_id("chatcmpl", request, body.request_id), body, sequences,
            with_ids=bool(body.return_token_ids), as_ids=bool(body.return_tokens_as_token_ids),
            top_logprobs=body.top_logprobs or 0, parse_tools=bool(body.tools) and body.tool_choice != "none",
        )  # fmt: skip
        events = (chat_events, body.stream_options) if body.stream else None
        return await self._answer(request, sequences, about, chat_answer, events)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = decode_body(await request.body(), DetokenizeRequest)
        self._check_model(body.model)
        known = [one for one in body.tokens if 0 <= one < self._served.vocab_size]
        return _json({"prompt": self._tokenizer.decode(known)})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = decode_body(await request.body(), TokenizeRequest)
        self._check_model(body.model)
        text = body.prompt
        if body.messages is not None:
            text = self._render(body.messages, body.tools, body.add_generation_prompt)
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
        text = render_metrics(self._loop, self._served.model)
        return Response(text, media_type="text/plain; version=0.0.4")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.model:
            raise RequestError(
                f"The model `{name}` does not exist. Valid aliases: {self._served.model}.",
                status=404,
                kind="NotFoundError",
                param="model",
            )

    def _render(
        self, messages: SequenceOf[Mapping[str, Any]], tools: SequenceOf[Mapping[str, Any]] | None, prompting: bool
    ) -> str:
        try:
            return self._tokenizer.render(template_messages(messages), tools, prompting)
        except StageError as error:
            raise (
                RequestError(str(error), param="messages") if not isinstance(error, RequestError) else error
            ) from error

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        """The prompts of a completion: a text, ids, or several of either."""
        given = body.prompt
        if isinstance(given, list) and not all(isinstance(one, int) for one in given):
            several: list[Any] = given
        else:
            several = [given]
        prompts = [self._tokenizer.encode(one) if isinstance(one, str) else one for one in several]
        if not all(isinstance(one, list) and one for one in prompts):
            raise RequestError("You must pass at least one prompt")
        return prompts

    def _about(self, name: str, fields: SamplingFields, sequences: list[Sequence], **more: Any) -> Answer:
        scores = None
        if fields.prompt_logprobs is not None:
            scores = self._loop.scheduler.score(sequences[0].prompt, fields.prompt_logprobs)
        return Answer(
            request_id=name, model=self._served.model, created=int(time.time()), decoder=self._decoder,
            copies=copies(fields), scores=scores, **more,
        )  # fmt: skip

    async def _answer(
        self,
        request: Request,
        sequences: list[Sequence],
        about: Answer,
        whole: Callable[[list[Sequence], Answer], dict[str, Any]],
        events: tuple[_Events, StreamOptions | None] | None,
    ) -> Response:
        """Generate, and answer whole or by events; who has gone gets nothing, and their sequences are aborted."""
        if events is None:
            if not await self._requests.run(request, about.request_id, sequences):
                return Response(status_code=499)
            return _json(whole(sequences, about))
        if len(sequences) > 1:
            raise RequestError(
                "the embedded engine streams one answer at a time; ask for n=1 and one prompt", param="n"
            )
        make, options = events
        draws = self._requests.stream(request, about.request_id, sequences[0])
        content = make(draws, sequences[0], about, with_usage=bool(options and options.include_usage))
        return StreamingResponse(content, media_type=MEDIA_TYPE)


class _Events(Protocol):
    """A maker of server-sent events, see `streams`."""

    def __call__(
        self, draws: AsyncIterator[int], sequence: Sequence, about: Answer, *, with_usage: bool
    ) -> AsyncIterator[bytes]:
        """The events of one answer."""
        ...


class _BearerGate:
    """Demands the api key everywhere but where there is nothing to tell or do: vLLM leaves its admin routes open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 in place of the application where the key is missing or wrong."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _json({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(
    loop: EngineLoop, tokenizer: Tokenizer, served: Served, api_key: str | None = None, *, dev_mode: bool = False
) -> ASGIApp:
    """The application over a running engine loop.

    Args:
        loop: whose `run` the caller keeps running.
        tokenizer: the model's.
        served: what is served.
        api_key: demanded as a bearer token on every route but /health; None leaves all open.
        dev_mode: whether there are routes that pause it and change its weights.
    """
    requests = Requests(loop, tokenizer, served.vocab_size, served.max_model_len)
    routes, admin = _Routes(loop, tokenizer, served, requests), Admin(loop, requests)
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", routes.generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", admin.abort_quietly, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
            *(admin.routes() if dev_mode else ()),
        ],
        exception_handlers={RequestError: _refused, HTTPException: _http_error, ClientDisconnect: _client_gone},
    )
    return app if api_key is None else _BearerGate(app, api_key)
