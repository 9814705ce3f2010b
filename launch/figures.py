"""The numbers behind the progress display, computed from status documents alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES = ("init", "run", "eval")


@dataclass(frozen=True)
class Snapshot:
    """What one status document says; None where it says nothing."""

    state: str
    queued: dict[str, int]
    leased: dict[str, int]
    accepted: int
    completed: int
    failed: int
    cancelled: int
    reward_mean: float | None
    tokens: int
    rollouts_per_s: float | None
    tokens_per_s: float | None
    replicas: int
    replicas_ok: int
    sessions: int
    stuck: str | None

    @property
    def ended(self) -> int:
        """Rollouts that will not change any more."""
        return self.completed + self.failed + self.cancelled

    @property
    def share(self) -> float:
        """Ended of accepted, 0 to 1."""
        return self.ended / self.accepted if self.accepted else 0.0


def snapshot(status: Mapping[str, Any]) -> Snapshot:
    """Read a status document; keys that are missing count as nothing, since it may come from another version."""
    stages, rollouts = _mapping(status, "stages"), _mapping(status, "rollouts")
    rates, fleet = _mapping(status, "rates"), [item for item in status.get("fleet") or () if isinstance(item, Mapping)]
    return Snapshot(
        state=str(status.get("state") or "starting"),
        queued={stage: _count(_mapping(stages, stage), "queued") for stage in STAGES},
        leased={stage: _count(_mapping(stages, stage), "leased") for stage in STAGES},
        accepted=_count(rollouts, "accepted"),
        completed=_count(rollouts, "completed"),
        failed=_count(rollouts, "failed"),
        cancelled=_count(rollouts, "cancelled"),
        reward_mean=_number(_mapping(status, "reward"), "mean"),
        tokens=_count(status, "tokens"),
        rollouts_per_s=_number(rates, "rollouts_per_s"),
        tokens_per_s=_number(rates, "tokens_per_s"),
        replicas=len(fleet),
        replicas_ok=sum(1 for item in fleet if item.get("state", "ready") == "ready"),
        sessions=sum(_count(item, "sessions") for item in fleet),
        stuck=str(status["stuck"]) if status.get("stuck") else None,
    )


@dataclass
class Pace:
    """How fast a count rises over the last `window_s`, for a status that gives no rate; the clock is passed in."""

    window_s: float = 20.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now_s: float, count: int) -> None:
        """Note the count at `now_s`."""
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - self.window_s:
            self._seen.popleft()

    @property
    def per_s(self) -> float | None:
        """None until there are two moments to compare."""
        if len(self._seen) < 2:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


def seconds_left(now: Snapshot, per_s: float | None) -> float | None:
    """Time until everything accepted has ended at this pace; None where nobody can say."""
    left = now.accepted - now.ended
    if left <= 0:
        return 0.0
    return left / per_s if per_s else None


def duration(seconds: float | None) -> str:
    """Seconds as people read them: 8 s, 2 min 05 s, 1 h 03 min."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def line(now: Snapshot, per_s: float | None) -> str:
    """One line for a log: where every rollout is, how good and how fast."""
    stages = " ".join(f"{stage} {now.queued[stage]}+{now.leased[stage]}" for stage in STAGES)
    parts = [f"{now.state}: {now.ended}/{now.accepted} ended", f"queued+leased {stages}"]
    if now.failed or now.cancelled:
        parts.append(f"failed {now.failed} cancelled {now.cancelled}")
    if now.reward_mean is not None:
        parts.append(f"mean reward {now.reward_mean:.3f}")
    if per_s is not None:
        parts.append(f"{per_s:.1f} rollouts/s")
    parts.append(f"left {duration(seconds_left(now, per_s))}")
    if now.stuck:
        parts.append(f"stuck: {now.stuck}")
    return ", ".join(parts)


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _count(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    return value if isinstance(value, int) else 0


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
