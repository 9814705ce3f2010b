"""The tiny policy as it learns by reward: log-probs of given tokens, clipped gradients, weights, checkpoints."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workflows.errors import TrainError
from workflows.policies.directory import weights_content
from workflows.policies.network import CONFIG, Qwen3
from workflows.train import objective
from workflows.train.learning import Prepared, Rules, Stats
from workflows.train.samples import Sample

CHUNK = 32
"""Samples of one forward pass: as many rows as still fit into a small machine's caches."""
GRAD_NORM = 1.0
BETAS = (0.9, 0.99)
WARM_UP = 10
"""Optimizer steps over which the learning rate rises: Adam's first ones are as large as the rate, noise or not."""
SHAPE = tuple(name for name in CONFIG if name not in {"torch_dtype", "initializer_range", "architectures"})

_KEPT = frozenset({".json", ".jinja"})

State = dict[str, Tensor]


class Learner:
    """Weights and optimizer of one policy.

    Args:
        directory: a Hugging Face directory of the shipped policies' shape.
        rules: see `Rules`.
        threads: of torch.

    Raises:
        TrainError: the directory holds another architecture, or no float32 safetensors.
    """

    def __init__(self, directory: Path, rules: Rules, threads: int) -> None:
        torch.set_num_threads(threads)
        _check_shape(directory)
        self._directory, self._rules = directory, rules
        self._model = Qwen3()
        self._model.load_state_dict(read_weights(directory / "model.safetensors"))
        self._first = self.snapshot()
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=rules.learning_rate, betas=BETAS)

    def snapshot(self) -> State:
        """A copy of the weights."""
        return {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    def logprobs(self, samples: Sequence[Sample], weights: State | None = None) -> list[list[float]]:
        """Of each sample's sampled tokens, under the current weights or those given."""
        current = None
        if weights is not None:
            current = self.snapshot()
            self._model.load_state_dict(weights)
        try:
            found: list[list[float]] = [[] for _ in samples]
            with torch.no_grad():
                for chunk in _chunks(samples):
                    flat = self._forward([samples[index] for index in chunk])[0].tolist()
                    for index in chunk:
                        count = len(samples[index].places)
                        found[index], flat = flat[:count], flat[count:]
            return found
        finally:
            if current is not None:
                self._model.load_state_dict(current)

    def first_logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The same under the policy that training began with."""
        return self.logprobs(samples, self._first)

    def update(self, batch: Sequence[Prepared], stats: Stats) -> None:
        """One optimizer step on these samples; adds to `stats`."""
        rules = self._rules
        samples = [one.sample for one in batch]
        shares = objective.token_shares(
            [len(sample.places) for sample in samples], [sample.rollout for sample in samples],
            over_tokens=rules.over_tokens,
        )  # fmt: skip
        self._optimizer.zero_grad()
        for chunk in _chunks(samples):
            new, entropy = self._forward([samples[index] for index in chunk])
            started = _flat([batch[index].started for index in chunk])
            counts = [len(samples[index].places) for index in chunk]
            weights = objective.lag_weights(
                torch, started, _flat([samples[index].recorded for index in chunk]), rules.weight_cap
            )
            gains = _spread([samples[index].gain for index in chunk], counts)
            losses, clipped = objective.token_losses(torch, new, started, weights, gains, rules.clip)
            if rules.kl:
                kl = objective.kl_estimates(torch, new, _flat([batch[index].reference for index in chunk]))
                losses = losses + rules.kl * kl
                stats.kl += float(kl.detach().sum())
            (losses * _spread([shares[index] for index in chunk], counts)).sum().backward()
            stats.tokens += len(new)
            stats.clipped += float(clipped.sum())
            stats.entropy += float(entropy.sum())
            stats.weight += float(weights.sum())
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRAD_NORM))
        if not math.isfinite(norm):
            raise TrainError(f"the gradient is {norm}: lower train.learning_rate, now {rules.learning_rate}")
        stats.grad_norm = max(stats.grad_norm, norm)
        for group in self._optimizer.param_groups:
            group["taken"] = group.get("taken", 0) + 1  # is saved with the optimizer's state
            group["lr"] = rules.learning_rate * min(1.0, group["taken"] / WARM_UP)
        self._optimizer.step()

    def _forward(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all sampled tokens, one after the other: [tokens] each."""
        width = max(len(sample.ids) for sample in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        rows = torch.tensor([row for row, sample in enumerate(samples) for _ in sample.places])
        places = torch.tensor([place for sample in samples for place in sample.places])
        hidden = self._model(ids)[rows, places - 1]
        logits = self._model.lm_head(hidden) / self._rules.temperature
        every = torch.log_softmax(logits, dim=-1)
        entropy = -(every.detach().exp() * every.detach()).sum(-1)
        return every.gather(1, ids[rows, places][:, None])[:, 0], entropy

    def policy_files(self) -> dict[str, bytes]:
        """The weights as the files of a Hugging Face directory that engines load."""
        files = {path.name: path.read_bytes() for path in sorted(self._directory.iterdir()) if path.suffix in _KEPT}
        files.pop("train_log.json", None)
        return {**files, "model.safetensors": weights_content(self._model.state_dict())}

    def optimizer_bytes(self) -> bytes:
        """The optimizer's state, for `restore`."""
        buffer = io.BytesIO()
        torch.save(self._optimizer.state_dict(), buffer)
        return buffer.getvalue()

    def restore(self, directory: Path, optimizer: bytes) -> None:
        """Go on from a directory of `policy_files` and its optimizer's state."""
        self._model.load_state_dict(read_weights(directory / "model.safetensors"))
        self._optimizer.load_state_dict(torch.load(io.BytesIO(optimizer), weights_only=True))


def read_weights(path: Path) -> State:
    """The tensors of a safetensors file in float32.

    Raises:
        TrainError: the file is missing, or holds another type.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrainError(f"{path}: cannot be read ({error.strerror}); give a Hugging Face directory") from error
    length = int.from_bytes(content[:8], "little")
    header: Mapping[str, Any] = json.loads(content[8 : 8 + length])
    tensors: State = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise TrainError(f"{path}: {name} is {entry['dtype']}; workflow=train takes float32 weights")
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(content[start:end]), dtype=torch.float32).reshape(entry["shape"])
    return tensors


def _check_shape(directory: Path) -> None:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise TrainError(f"{directory / 'config.json'}: cannot be read: {error}") from error
    for name in SHAPE:
        if config.get(name) != CONFIG[name]:
            raise TrainError(
                f"{directory / 'config.json'}: {name} is {config.get(name)!r}; workflow=train trains the shipped "
                f"policies' shape alone, with {CONFIG[name]!r}: use a trainer of docs/trainers.md for other models"
            )


def _chunks(samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Indices of samples that go through the model together: of like lengths, so that little is padding."""
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].ids))
    for start in range(0, len(order), CHUNK):
        yield order[start : start + CHUNK]


def _flat(lists: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for values in lists for value in values])


def _spread(values: Sequence[float], counts: Sequence[int]) -> Tensor:
    return torch.tensor(values).repeat_interleave(torch.tensor(counts))
