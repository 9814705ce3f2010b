"""What clients get: answers, usage and errors with every field of vLLM 0.32's JSON, those we never fill as null."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

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

    def answer(self, sequence: Sequence, drawn: int | None = None) -> str:
        """Text of what was drawn (of the first `drawn` tokens), without the token or the string that ended it."""
        ids = token_ids(sequence)[:drawn]
        stop = sequence.stop_reason if drawn is None or drawn == len(sequence.drawn) else None
        if sequence.finish_reason == "stop" and len(ids) == len(sequence.drawn) and not isinstance(stop, str):
            ids = ids[:-1]
        text = self._tokenizer.decode([token for token in ids if token not in self._special])
        return text[: text.rfind(stop)] if isinstance(stop, str) and stop in text else text

    def token(self, token_id: int) -> str:
        """Text of one token, special or not."""
        return self._tokenizer.decode([token_id])


def token_ids(sequence: Sequence) -> list[int]:
    """What was drawn."""
    return sequence.tokens[len(sequence.prompt) :]


def _candidates(drawn: Drawn) -> list[Candidate]:
    """The drawn token first, then the best ones: each token once."""
    return [drawn.chosen, *(one for one in drawn.best if one.token_id != drawn.chosen.token_id)]


def usage(sequences: list[Sequence], copies: int = 1, *, created_cache: int | None = None) -> dict[str, Any]:
    """Token counts of a request, of which each prompt has so many copies and is counted once."""
    prompts = sequences[::copies]
    prompt, drawn = sum(len(one.prompt) for one in prompts), sum(len(one.drawn) for one in sequences)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + drawn,
        "completion_tokens": drawn,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.cached_tokens or 0 for one in prompts),
            "created_cache_tokens": created_cache,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def token_logprobs(drawn_tokens: list[Drawn]) -> dict[str, Any]:
    """Log-probs by token id, as /inference/v1/generate gives them."""
    return {
        "content": [
            {
                "token_id": drawn.chosen.token_id,
                "logprob": drawn.chosen.logprob,
                "rank": drawn.chosen.rank,
                "top_logprobs": _candidates(drawn),
            }
            for drawn in drawn_tokens
        ]
    }


def text_logprobs(drawn_tokens: list[Drawn], decoder: Decoder, shown: int, *, as_ids: bool = False) -> dict[str, Any]:
    """Log-probs by text, as chats give them, with `shown` alternatives; a token's name may be its id."""

    def entry(one: Candidate) -> dict[str, Any]:
        text = decoder.token(one.token_id)
        name = f"token_id:{one.token_id}" if as_ids else text
        return {"token": name, "logprob": one.logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {**entry(drawn.chosen), "top_logprobs": [entry(one) for one in _candidates(drawn)[:shown]]}
            for drawn in drawn_tokens
        ]
    }


def completion_logprobs(
    drawn_tokens: list[Drawn], decoder: Decoder, *, as_ids: bool, offset: int = 0
) -> dict[str, Any]:
    """Log-probs as /v1/completions gives them; `offset` is where their text begins."""

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else decoder.token(token_id)

    tokens = [name(drawn.chosen.token_id) for drawn in drawn_tokens]
    offsets, at = [], offset
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [drawn.chosen.logprob for drawn in drawn_tokens],
        "tokens": tokens,
        "top_logprobs": [{name(one.token_id): one.logprob for one in _candidates(drawn)} for drawn in drawn_tokens],
    }


def prompt_logprobs(scores: list[Drawn], decoder: Decoder) -> list[dict[str, Any] | None]:
    """Log-probs of a prompt's tokens, of which the first has none."""

    def entry(drawn: Drawn) -> dict[str, Any]:
        return {
            str(one.token_id): {
                "logprob": one.logprob,
                "rank": one.rank,
                "decoded_token": decoder.token(one.token_id),
            }
            for one in _candidates(drawn)
        }

    return [None, *(entry(one) for one in scores)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers to one request share.

    Args:
        request_id: the full id.
        model: the served name.
        created: Unix time, s.
        decoder: text of tokens.
        copies: answers to each prompt.
        with_ids: whether token ids are told.
        as_ids: whether log-probs name tokens by id.
        as_text: whether /inference/v1/generate gives text.
        top_logprobs: how many alternatives a chat shows.
        scores: log-probs of the prompt, where asked for.
        parse_tools: whether a chat reads tool calls.
    """

    request_id: str
    model: str
    created: int
    decoder: Decoder
    copies: int = 1
    with_ids: bool = False
    as_ids: bool = False
    as_text: bool = False
    top_logprobs: int = 0
    scores: list[Drawn] | None = None
    parse_tools: bool = False

    @property
    def prompt_scores(self) -> list[dict[str, Any] | None] | None:
        """Log-probs of the prompt as answers show them."""
        return None if self.scores is None else prompt_logprobs(self.scores, self.decoder)


def generate_answer(sequences: list[Sequence], about: Answer) -> dict[str, Any]:
    """The answer of /inference/v1/generate."""
    return {
        "request_id": about.request_id,
        "model": about.model,
        "created": about.created,
        "usage": usage(sequences, about.copies),
        "prompt_logprobs": about.prompt_scores,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": sequences[0].prompt if about.with_ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "text" if about.as_text else "tokens",
        "choices": [_generated(index, one, about) for index, one in enumerate(sequences)],
    }


def _generated(index: int, sequence: Sequence, about: Answer) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": token_ids(sequence),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": sequence.versions,
    }
    if about.as_text:
        choice["text"] = about.decoder.answer(sequence)
    choice["logprobs"] = generate_logprobs(sequence, sequence.drawn, about)
    return choice


def generate_logprobs(sequence: Sequence, drawn: list[Drawn], about: Answer) -> dict[str, Any] | None:
    """Of these tokens in the form that was asked for."""
    if sequence.params.logprobs is None:
        return None
    if about.as_text:
        return text_logprobs(drawn, about.decoder, sequence.params.logprobs)
    return token_logprobs(drawn)


def completion_answer(sequences: list[Sequence], about: Answer) -> dict[str, Any]:
    """The answer of /v1/completions."""

    def choice(index: int, sequence: Sequence) -> dict[str, Any]:
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = completion_logprobs(sequence.drawn, about.decoder, as_ids=about.as_ids)
        return {
            "index": index,
            "text": about.decoder.answer(sequence),
            "logprobs": logprobs,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": token_ids(sequence) if about.with_ids else None,
            "prompt_logprobs": about.prompt_scores,
            "prompt_token_ids": sequence.prompt if about.with_ids else None,
            "routed_experts": None,
        }

    return {
        "id": about.request_id,
        "object": "text_completion",
        "created": about.created,
        "model": about.model,
        "choices": [choice(index, one) for index, one in enumerate(sequences)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(sequences, about.copies),
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
