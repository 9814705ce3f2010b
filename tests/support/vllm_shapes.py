"""The shapes of vLLM 0.32's answers, key by key in their order, as a real server gave them."""

from __future__ import annotations

from typing import Any

USAGE = {
    "prompt_tokens": int,
    "total_tokens": int,
    "completion_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int, "created_cache_tokens": None, "multimodal_tokens": None},
    "completion_tokens_details": None,
}
TOKEN_LOGPROB = {"token_id": int, "logprob": float, "rank": int}
GENERATE = {
    "request_id": str,
    "model": str,
    "created": int,
    "usage": USAGE,
    "prompt_logprobs": None,
    "prompt_token_id_logprobs": None,
    "prompt_token_ids": None,
    "mm_placeholders": None,
    "metrics": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "output_mode": str,
    "choices": [
        {
            "index": int,
            "finish_reason": str,
            "stop_reason": None,
            "token_ids": [int],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": str, "start": int, "end": int}],
            "logprobs": {"content": [{**TOKEN_LOGPROB, "top_logprobs": [TOKEN_LOGPROB]}]},
        }
    ],
}
COMPLETION = {
    "id": str,
    "object": str,
    "created": int,
    "model": str,
    "choices": [
        {
            "index": int,
            "text": str,
            "logprobs": {"text_offset": [int], "token_logprobs": [float], "tokens": [str], "top_logprobs": [dict]},
            "finish_reason": str,
            "stop_reason": None,
            "token_ids": [int],
            "prompt_logprobs": None,
            "prompt_token_ids": [int],
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": str,
    "usage": USAGE,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}

CHAT = {
    "id": str,
    "object": str,
    "created": int,
    "model": str,
    "choices": [
        {
            "index": int,
            "message": {
                "role": str,
                "content": None,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [{"id": str, "type": str, "function": {"name": str, "arguments": str}}],
                "reasoning": None,
            },
            "logprobs": {"content": [{"token": str, "logprob": float, "bytes": list, "top_logprobs": list}]},
            "finish_reason": str,
            "stop_reason": None,
            "token_ids": [int],
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": str,
    "usage": {**USAGE, "prompt_tokens_details": {**USAGE["prompt_tokens_details"], "created_cache_tokens": int}},  # type: ignore[dict-item]
    "prompt_logprobs": None,
    "prompt_token_ids": [int],
    "prompt_text": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}


def check_shape(found: Any, expected: Any, where: str = "$") -> None:
    """Same keys in the same order, same types; a list's items all have the one shape given."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert list(found) == list(expected), where
        for key, value in expected.items():
            check_shape(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert found, where
        for item in found:
            check_shape(item, expected[0], f"{where}[]")
    elif expected is None:
        assert found is None, where
    else:
        assert type(found) is expected, where
