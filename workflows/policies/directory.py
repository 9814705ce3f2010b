"""Writes a model directory that every engine can load: weights, config, tokenizer and chat template."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stages.chat import ChatTokenizer
from workflows.policies.network import CONFIG

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")
EOS, PAD = "<|im_end|>", "<|endoftext|>"


def write_tokenizer(directory: Path, tokenizer: Mapping[str, Any]) -> ChatTokenizer:
    """Write everything but the weights and return the tokenizer as engines will load it."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = tokenizer["model"]["vocab"]
    ends = {"eos_token_id": vocab[EOS], "pad_token_id": vocab[PAD]}
    _write_json(directory / "tokenizer.json", tokenizer)
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": ["<|im_start|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": template,
        },
    )
    _write_json(directory / "config.json", {**CONFIG, "bos_token_id": None, **ends})
    _write_json(directory / "generation_config.json", {"do_sample": True, "temperature": 1.0, **ends})
    return ChatTokenizer.load(directory)


def weights_content(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Float32 tensors in the safetensors format: a length, a JSON header, then the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, tensor in sorted(tensors.items()):
        part = tensor.detach().to(torch.float32).contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + len(part)]}
        parts.append(part)
        offset += len(part)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *parts])


def write_log(directory: Path, log: Mapping[str, Any]) -> None:
    """Write train_log.json."""
    _write_json(directory / "train_log.json", log)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
