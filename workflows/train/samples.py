"""What is learnt from: each chain of a rollout as its tokens, where the policy drew them, and with which log-prob."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from workflows.errors import TrainError
from workflows.train import objective


@dataclass(frozen=True)
class Sample:
    """One chain. Lists after `ids` have an entry for each sampled token."""

    ids: list[int]
    """The whole stream."""
    places: list[int]
    """Where in it the sampled tokens are; never 0."""
    recorded: list[float]
    """Their log-probs, as the engine gave them."""
    versions: list[int]
    """The policy version that drew each."""
    gain: float = 0.0
    """The rollout's advantage."""
    rollout: str = ""
    """The rollout that it is a chain of."""

    @property
    def oldest(self) -> int:
        """The oldest version of any of its tokens."""
        return min(self.versions)


class Chain(Protocol):
    """What is asked of a shard's chain."""

    def __getitem__(self, name: str) -> Any:
        """A column."""
        ...


@dataclass(frozen=True)
class Rollout:
    """One rollout that may be learnt from."""

    rollout_id: str
    reward: float
    samples: tuple[Sample, ...]

    @property
    def length(self) -> int:
        """Sampled tokens of all its chains."""
        return sum(len(sample.places) for sample in self.samples)


@dataclass(frozen=True)
class Group:
    """A closed group: the rollouts of one task that count."""

    group_id: str
    rollouts: tuple[Rollout, ...]
    masked: int = 0

    @property
    def rewards(self) -> list[float]:
        """As the verifier gave them."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def has_spread(self) -> bool:
        """Whether the rewards differ."""
        return len(set(self.rewards)) > 1


def from_chain(chain: Chain) -> Sample:
    """A shard's chain as a sample.

    Raises:
        TrainError: the spans of `policy_versions` do not cover the sampled tokens.
    """
    ids, mask, logprobs = chain["token_ids"], chain["loss_mask"], chain["logprobs"]
    places = [place for place, sampled in enumerate(mask) if sampled and place]
    spans = {place: span["version"] for span in chain["policy_versions"] for place in range(span["start"], span["end"])}
    missing = [place for place in places if place not in spans]
    if missing:
        raise TrainError(
            f"the token at {missing[0]} was sampled, and the engine names no policy version: use a fleet with token "
            "routes"
        )
    return Sample(ids, places, [logprobs[place] for place in places], [spans[place] for place in places])


@dataclass(frozen=True)
class Shaping:
    """How rewards become advantages."""

    overlong: int | None = None
    overlong_tail: int = 1
    permuted: bool = False
    seed: int = 0


def with_gains(groups: Iterable[Group], shaping: Shaping) -> list[Sample]:
    """The samples of all groups with their advantages; a rollout without sampled tokens has nothing to learn from."""
    samples: list[Sample] = []
    for group in groups:
        rewards = group.rewards
        if shaping.permuted:
            rewards = objective.permuted(rewards, f"{shaping.seed} {group.group_id}")
        if shaping.overlong is not None:
            rewards = [
                reward + objective.overlong_penalty(rollout.length, shaping.overlong, shaping.overlong_tail)
                for reward, rollout in zip(rewards, group.rollouts, strict=True)
            ]
        for gain, rollout in zip(objective.advantages(rewards), group.rollouts, strict=True):
            name = rollout.rollout_id
            samples += [replace(sample, gain=gain, rollout=name) for sample in rollout.samples if sample.places]
    return samples


@dataclass
class Reencoding:
    """What happened to samples whose text was encoded again."""

    samples: int = 0
    changed: int = 0
    """Samples whose token ids are others than those that were sampled."""
    broken: int = 0
    """Of those, the ones with another number of tokens: their log-probs belong to no token any more."""

    def __add__(self, other: Reencoding) -> Reencoding:
        return Reencoding(
            self.samples + other.samples, self.changed + other.changed, self.broken + other.broken
        )  # fmt: skip


def reencoded(
    samples: Sequence[Sample], decode: Callable[[Sequence[int]], str], encode: Callable[[str], list[int]]
) -> tuple[list[Sample], Reencoding]:
    """The samples as a trainer sees them that gets text: decoded and encoded again, the log-probs laid on by place.

    A turn whose encoding has another length breaks its sample, which is left out.
    """
    kept, count = [], Reencoding(samples=len(samples))
    for sample in samples:
        again = _reencoded(sample, decode, encode)
        if again is None:
            count.broken += 1
            count.changed += 1
            continue
        count.changed += again != sample.ids
        kept.append(replace(sample, ids=again))
    return kept, count


def _reencoded(
    sample: Sample, decode: Callable[[Sequence[int]], str], encode: Callable[[str], list[int]]
) -> list[int] | None:
    """The stream with each run of sampled tokens encoded again; None where a run's length changes."""
    ids = list(sample.ids)
    for start, end in runs(sample.places):
        again = encode(decode(ids[start:end]))
        if len(again) != end - start:
            return None
        ids[start:end] = again
    return ids


def runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """[start, end) of each unbroken run of places."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


def lags(samples: Iterable[Sample], version: int) -> list[int]:
    """How many versions each sample's oldest token is behind `version`."""
    return [version - sample.oldest for sample in samples]


def group_of(group_id: str, rows: Iterable[Any]) -> Group:
    """A group from its rows, as the shard reader gives them; masked rows are counted and left out."""
    rollouts, masked = [], 0
    for row in rows:
        line = row.line
        if line.mask_sample or line.reward is None:
            masked += 1
            continue
        rollouts.append(Rollout(line.rollout_id, line.reward, tuple(from_chain(chain) for chain in row.chains)))
    return Group(group_id, tuple(rollouts), masked)


def mean(values: Mapping[str, float] | Sequence[float]) -> float:
    """The mean; 0.0 of nothing."""
    listed = list(values.values()) if isinstance(values, Mapping) else list(values)
    return sum(listed) / len(listed) if listed else 0.0
