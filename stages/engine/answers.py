"""What clients get: answers, usage and errors with every field of vLLM 0.32's JSON, those we never fill as null."""

from __future__ import annotations

from typing import Any, Protocol

from stages.engine.errors import RequestError
from stages.engine.sampling import Candidate, Drawn
from stages.engine.sequence import Sequence

VLLM_VERSION = "0.32.0"
"""The version whose wire format this is; clients that look at it must find what they know."""

FINGERPRINT = f"vllm-{VLLM_VERSION}-embedded"


class Texts(Protocol):
    """What answers need of a tokenizer."""

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, special ones kept."""
        ...


class Decoder:
    """Text of answers: special tokens are left out, as vLLM does unless asked otherwise.

    Args:
        tokenizer: the model's.
        special: ids that never show in text.
    """

    def __init__(self, tokenizer: Texts, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def answer(self, sequence: Sequence) -> str:
        """Text of what was drawn, without the token that ended it."""
        ids = _token_ids(sequence)
        return self._tokenizer.decode(
            [token for token in (ids[:-1] if sequence.finish_reason == "stop" else ids) if token not in self._special]
        )

    def token(self, token_id: int) -> str:
        """Text of one token, special or not."""
        return self._tokenizer.decode([token_id])


def _token_ids(sequence: Sequence) -> list[int]:
    return sequence.tokens[len(sequence.prompt) :]


def _candidates(drawn: Drawn) -> list[Candidate]:
    """The drawn token first, then the best ones: each token once."""
    return [drawn.chosen, *(one for one in drawn.best if one.token_id != drawn.chosen.token_id)]


def usage(sequence: Sequence) -> dict[str, Any]:
    """Token counts of a request."""
    prompt, drawn = len(sequence.prompt), len(sequence.drawn)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + drawn,
        "completion_tokens": drawn,
        "prompt_tokens_details": {
            "cached_tokens": sequence.cached_tokens or 0,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def _token_logprobs(sequence: Sequence) -> dict[str, Any]:
    return {
        "content": [
            {
                "token_id": drawn.chosen.token_id,
                "logprob": drawn.chosen.logprob,
                "rank": drawn.chosen.rank,
                "top_logprobs": _candidates(drawn),
            }
            for drawn in sequence.drawn
        ]
    }


def _text_logprobs(sequence: Sequence, decoder: Decoder) -> dict[str, Any]:
    def entry(one: Candidate) -> dict[str, Any]:
        text = decoder.token(one.token_id)
        return {"token": text, "logprob": one.logprob, "bytes": list(text.encode())}

    shown = sequence.params.logprobs or 0
    return {
        "content": [
            {**entry(drawn.chosen), "top_logprobs": [entry(one) for one in _candidates(drawn)[:shown]]}
            for drawn in sequence.drawn
        ]
    }


def generate_answer(
    sequence: Sequence,
    *,
    request_id: str,
    model: str,
    created: int,
    weight_version: str,
    echo_prompt: bool,
    decoder: Decoder | None,
) -> dict[str, Any]:
    """The answer of /inference/v1/generate; with a decoder in output mode text, else tokens."""
    token_ids = _token_ids(sequence)
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": weight_version, "start": 0, "end": len(token_ids)}],
    }
    if decoder is not None:
        choice["text"] = decoder.answer(sequence)
    choice["logprobs"] = None
    if sequence.params.logprobs is not None:
        choice["logprobs"] = _text_logprobs(sequence, decoder) if decoder else _token_logprobs(sequence)
    return {
        "request_id": request_id,
        "model": model,
        "created": created,
        "usage": usage(sequence),
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": sequence.prompt if echo_prompt else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens" if decoder is None else "text",
        "choices": [choice],
    }


def _completion_logprobs(sequence: Sequence, decoder: Decoder, as_ids: bool) -> dict[str, Any]:
    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else decoder.token(token_id)

    tokens = [name(drawn.chosen.token_id) for drawn in sequence.drawn]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [drawn.chosen.logprob for drawn in sequence.drawn],
        "tokens": tokens,
        "top_logprobs": [{name(one.token_id): one.logprob for one in _candidates(drawn)} for drawn in sequence.drawn],
    }


def completion_answer(
    sequence: Sequence,
    *,
    request_id: str,
    model: str,
    created: int,
    decoder: Decoder,
    with_ids: bool,
    tokens_as_ids: bool,
) -> dict[str, Any]:
    """The answer of /v1/completions."""
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = _completion_logprobs(sequence, decoder, tokens_as_ids)
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "text": decoder.answer(sequence),
                "logprobs": logprobs,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
                "token_ids": _token_ids(sequence) if with_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": sequence.prompt if with_ids else None,
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(sequence),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def model_list(model: str, root: str, created: int, max_model_len: int) -> dict[str, Any]:
    """The answer of /v1/models: the one model that is served."""
    permission = {
        "id": f"modelperm-{model}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


def error_answer(error: RequestError) -> dict[str, Any]:
    """The error object, as vLLM writes it."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.status}}
