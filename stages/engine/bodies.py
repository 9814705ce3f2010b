"""What clients send: request bodies, their checks, and refusals worded as vLLM words them."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from stages.engine.errors import RequestError
from stages.engine.sampling import SamplingParams

T = TypeVar("T")

MAX_LOGPROBS = 20
_DEFAULT_MAX_TOKENS = 16

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
}
"""Fields that would change the answer and that this engine does not compute, with the values that ask for nothing."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as clients write it; None means the default. Fields that are unknown to us are ignored, as vLLM does."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    min_tokens: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream holds beside the tokens."""

    include_usage: bool | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /inference/v1/generate: tokens in, tokens out."""

    token_ids: list[int]
    sampling_params: SamplingFields
    request_id: str = ""
    model: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions: one prompt or several, as text or ids."""

    prompt: str | list[int | str | list[int]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    model: str | None = None
    request_id: str = ""
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatLogprobs(SamplingFields, frozen=True, kw_only=True):
    """Sampling of a chat, whose `logprobs` is a switch and whose number is `top_logprobs`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class ChatRequest(ChatLogprobs, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    model: str | None = None
    request_id: str = ""
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /inference/v1/abort_requests and /abort_requests."""

    request_ids: list[str]


class WeightVersionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /update_weight_version."""

    new_version: str


class CollectiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /collective_rpc."""

    method: str
    kwargs: dict[str, Any] = {}


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


_PYDANTIC = {
    "int": ("int_type", "Input should be a valid integer"),
    "float": ("float_type", "Input should be a valid number"),
    "str": ("string_type", "Input should be a valid string"),
    "bool": ("bool_type", "Input should be a valid boolean"),
    "array": ("list_type", "Input should be a valid list"),
    "object": ("model_attributes_type", "Input should be a valid dictionary or object to extract fields from"),
}


def _validation_error(kind: str, loc: str, message: str, shown: str) -> RequestError:
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{loc}', 'msg': '{message}', 'input': '{shown}'"
    if kind == "too_short":
        text += ", 'ctx': {'field_type': 'List', 'min_length': 1, 'actual_length': 0}"
    return RequestError(text + "}", kind="Bad Request", param=loc)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Read a JSON body into one of the request records.

    Raises:
        RequestError: not JSON, a field missing, or of another type; the error has the shape of vLLM's validation
            errors.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        loc = "body" + re.sub(r"\[(\d+|\.\.\.)\]", r".\1", where.rstrip("`"))
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing:
            raise _validation_error("missing", f"{loc}.{missing[1]}", "Field required", "<dict>") from error
        found = re.match(r"Expected `([^`|]+?)(?: \|[^`]*)?`(?:, got `([^`]+)`)?", text)
        name, message = _PYDANTIC.get(found[1] if found else "", ("value_error", text.replace("`", "")))
        shown = found[2] if found and found[2] else "value"
        raise _validation_error(name, loc, message, "None" if shown == "null" else f"<{shown}>") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _validation_error("json_invalid", "body", f"JSON decode error: {error}", "<bytes>") from error


def _refuse(message: str, parameter: str, value: object) -> RequestError:
    return RequestError(f"{message} (parameter={parameter}, value={value})", param=parameter)


def refuse_unsupported(fields: msgspec.Struct) -> None:
    """Refuse a field that asks for what this engine does not compute: ignoring it would change the answer silently.

    Raises:
        RequestError: names the field and its value.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(fields, name, None)
        if value not in neutral:
            raise _refuse(
                f"{name}={value!r} is not computed by the embedded engine; leave it out, or use fleet=vllm", name, value
            )


def chat_params(fields: ChatRequest, room: int) -> SamplingParams:
    """Check and complete a chat's sampling; without a bound it may fill the `room` that its prompt leaves.

    Raises:
        RequestError: see `sampling_params`.
    """
    given = {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}
    given["logprobs"] = (fields.top_logprobs or 0) if fields.logprobs else None
    given["max_tokens"] = fields.max_completion_tokens or fields.max_tokens or max(1, room)
    return sampling_params(SamplingFields(**given))


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """The texts that end an answer.

    Raises:
        RequestError: an empty one.
    """
    given = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if "" in given:
        raise RequestError("stop cannot contain an empty string.", param="stop")
    return given


def copies(fields: SamplingFields) -> int:
    """How many answers to each prompt.

    Raises:
        RequestError: fewer than one.
    """
    count = 1 if fields.n is None else fields.n
    if count < 1:
        raise _refuse(f"n must be at least 1, got {count}.", "n", count)
    return count


def sampling_params(fields: SamplingFields) -> SamplingParams:
    """Check and complete what the client wrote.

    Raises:
        RequestError: a value out of range, or a field that this engine does not compute.
    """
    refuse_unsupported(fields)
    given = {name: value for name in SamplingParams.__struct_fields__ if (value := getattr(fields, name)) is not None}
    given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    params = SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, **given})
    if not 0.0 <= params.temperature < float("inf"):
        raise _refuse(f"temperature must be non-negative, got {params.temperature}.", "temperature", params.temperature)
    if not 0.0 < params.top_p <= 1.0:
        raise _refuse(f"top_p must be in (0, 1], got {params.top_p}.", "top_p", params.top_p)
    if params.top_k < -1:
        raise _refuse(f"top_k must be 0 (disable), or at least 1, got {params.top_k}.", "top_k", params.top_k)
    if not 0.0 <= params.min_p <= 1.0:
        raise _refuse(f"min_p must be in [0, 1], got {params.min_p}.", "min_p", params.min_p)
    if params.max_tokens < 1:
        raise _refuse(f"max_tokens must be at least 1, got {params.max_tokens}.", "max_tokens", params.max_tokens)
    if params.logprobs is not None and params.logprobs < 0:
        raise _refuse(f"logprobs must be non-negative, got {params.logprobs}.", "logprobs", params.logprobs)
    if fields.prompt_logprobs is not None and not 0 <= fields.prompt_logprobs <= MAX_LOGPROBS:
        raise _refuse(
            f"prompt_logprobs must be in [0, {MAX_LOGPROBS}], got {fields.prompt_logprobs}.",
            "prompt_logprobs",
            fields.prompt_logprobs,
        )
    if params.logprobs is not None and params.logprobs > MAX_LOGPROBS:
        raise _refuse(
            f"Requested sample logprobs of {params.logprobs}, which is greater than max allowed: {MAX_LOGPROBS}",
            "logprobs",
            params.logprobs,
        )
    return params


def check_prompt(token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    """Check a prompt against the model.

    Raises:
        RequestError: a token id that the model has not, or no room for a single token of an answer.
    """
    count = len(token_ids)
    if count >= max_model_len:
        raise _refuse(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {count} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            "input prompt.",
            "input_tokens",
            count,
        )
    for token in (max(token_ids), min(token_ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(f"Token id {token} is out of vocabulary")


def empty_token_ids() -> RequestError:
    """The refusal of a generate request without tokens."""
    return _validation_error(
        "too_short", "body.token_ids", "List should have at least 1 item after validation, not 0", "<list of 0 items>"
    )


def bad_literal(where: str, given: str, allowed: tuple[str, ...]) -> RequestError:
    """The refusal of a word that is none of the allowed ones."""
    words = ", ".join(f"'{word}'" for word in allowed[:-1]) + f" or '{allowed[-1]}'"
    text = f"{{'type': 'literal_error', 'loc': '{where}', 'msg': \"Input should be {words}\", 'input': '{given}', "
    text += f"'ctx': {{'expected': \"{words}\"}}}}"
    return RequestError(f"1 validation error:\n  {text}", kind="Bad Request", param=where)
