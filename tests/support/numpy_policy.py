"""A policy that learns nothing and yet gets better: its versions lead from tiny-half's weights to tiny's, by NumPy.

It stands in for torch's where no torch is: log-probs are the engine's own arithmetic over the pushed weights, so that
whatever a loop mixes up (versions, masks, rows) shows as a gap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import log_softmax
from tests.support.runs import REPOSITORY
from workflows.train.learning import Prepared, Stats
from workflows.train.samples import Sample

POLICIES = REPOSITORY / "workflows" / "policies"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class NumpyPolicy:
    """Serves as a `Learner`.

    Args:
        scratch: a directory of its own, for what it computes with.
        updates: optimizer steps until it is `tiny`.
    """

    def __init__(self, scratch: Path, updates: int) -> None:
        self._scratch, self._updates = scratch, updates
        self.steps = 0
        self._models: dict[int, Qwen3] = {}
        self._ends = [load((POLICIES / name / "model.safetensors").read_bytes()) for name in ("tiny-half", "tiny")]

    def snapshot(self) -> int:
        return self.steps

    def policy_files(self) -> dict[str, bytes]:
        share = min(1.0, self.steps / self._updates)
        first, last = self._ends
        mixed = {name: ((1 - share) * first[name] + share * last[name]).astype("float32") for name in first}
        files = {name: (POLICIES / "tiny-half" / name).read_bytes() for name in FILES}
        return {**files, "model.safetensors": save(mixed)}

    def _model(self, steps: int) -> Qwen3:
        if steps not in self._models:
            directory = self._scratch / str(steps)
            directory.mkdir(parents=True, exist_ok=True)
            before, self.steps = self.steps, steps
            for name, content in self.policy_files().items():
                (directory / name).write_bytes(content)
            self.steps = before
            self._models[steps] = Qwen3.load(directory)
        return self._models[steps]

    def logprobs(self, samples: Sequence[Sample], weights: Any = None) -> list[list[float]]:
        model = self._model(self.steps if weights is None else weights)
        found = []
        for sample in samples:
            every = log_softmax(model.logits(sample.ids))
            found.append([float(every[place - 1, sample.ids[place]]) for place in sample.places])
        return found

    def first_logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self.logprobs(samples, 0)

    def update(self, batch: Sequence[Prepared], stats: Stats) -> None:
        self.steps += 1
        stats.tokens += sum(len(one.started) for one in batch)

    def optimizer_bytes(self) -> bytes:
        return json.dumps(self.steps).encode()

    def restore(self, directory: Path, optimizer: bytes) -> None:
        self.steps = json.loads(optimizer)
        assert (directory / "model.safetensors").read_bytes() == self.policy_files()["model.safetensors"]
