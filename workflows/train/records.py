"""What is kept of training: a record an update, and the state that makes a killed trainer go on where it was."""

from __future__ import annotations

import contextlib
import csv
import io
from pathlib import Path

import msgspec

from stages import sharedfs
from workflows.errors import TrainError
from workflows.train.collecting import Wave

VERSION = 1


class Record(msgspec.Struct, kw_only=True):
    """One update: a line of report/train.csv. Names end in their unit; shares are of 1."""

    step: int
    """Updates so far; also the policy version that this one made."""
    elapsed_s: float = 0.0
    """Seconds of training up to here, time in which the trainer was dead left out."""
    reward: float = 0.0
    """Mean reward of all rollouts that count, groups without spread included."""
    heldout: float | None = None
    """Share of held-out problems solved by the version that this update made."""
    heldout_low: float | None = None
    heldout_high: float | None = None
    """Its 95 % interval (Wilson)."""
    heldout_problems: int | None = None
    """Problems whose rollout counts: what the share is of."""
    heldout_asked: int | None = None
    """Problems that were asked for; more than counted where the infrastructure lost some."""
    length: float = 0.0
    """Mean sampled tokens of a rollout."""
    groups_asked: int = 0
    groups_kept: int = 0
    groups_flat: int = 0
    """Left out (dapo) or without effect (grpo), because the rewards did not differ."""
    groups_short: int = 0
    """Left out, because fewer than two of their rollouts count."""
    masked: int = 0
    """Rollouts that the infrastructure lost."""
    lag_mean: float = 0.0
    lag_max: int = 0
    """Versions that a sample's oldest token is behind the version that the update starts from."""
    weight: float = 1.0
    """Mean weight of a token by `objective.lag_weights`."""
    gap_max: float = 0.0
    gap_mean: float = 0.0
    """Between the engine's log-prob of a token and the trainer's, under the version that drew it."""
    gap_tokens: int = 0
    clip_share: float = 0.0
    """Tokens whose gradient the clip took away."""
    entropy: float = 0.0
    kl: float = 0.0
    """Mean distance to the first policy, where train.kl counts it."""
    grad_norm: float = 0.0
    reencoded: int = 0
    """Samples that decoding and encoding again would change."""
    broken: int = 0
    """Those of them whose number of tokens it would change."""
    samples: int = 0
    tokens: int = 0
    """Sampled tokens of all rollouts of the update's waves."""
    tokens_per_s: float = 0.0
    """Of the whole cycle."""
    rollout_s: float = 0.0
    """Waiting for rollouts."""
    train_s: float = 0.0
    push_s: float = 0.0
    """Writing weights and state, and bringing the version onto the fleet."""
    heldout_s: float = 0.0
    groups: list[str] = msgspec.field(default_factory=list)
    """The groups that were learnt from; not in the table."""


class State(msgspec.Struct, kw_only=True):
    """Everything but weights and optimizer; the file whose appearance makes an update count."""

    v: int = VERSION
    version: int = 0
    cursor: int = 0
    """Tasks that have been asked for."""
    rate: float = 0.5
    """Share of groups with spread, smoothed."""
    seq: int = 0
    """Results up to here are of no wave that is still waited for."""
    ahead: Wave | None = None
    """Asked for already, for the next update."""
    records: list[Record] = msgspec.field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training."""
        return self.records[-1].elapsed_s if self.records else 0.0


class Places:
    """Where a trainer keeps things in its run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "train"
        self.state = self.root / "state.json"
        self.table = run_dir / "report" / "train.csv"
        self.report = run_dir / "report" / "train.json"
        self.picture = run_dir / "report" / "train.png"

    def policy(self, version: int) -> Path:
        """The weights of a version, as engines load them."""
        return self.root / f"policy-{version:06d}"

    def optimizer(self, version: int) -> Path:
        """The optimizer's state after the update that made a version."""
        return self.root / f"optimizer-{version:06d}.pt"

    def sweep(self, version: int) -> None:
        """Take away what a trainer that was killed has left: half-written files, and everything up to a version."""
        for name in sharedfs.list_dir(self.root):
            if name.endswith(".tmp"):
                sharedfs.unlink(self.root / name)
            kind, _, number = name.removesuffix(".pt").rpartition("-")
            if kind in ("optimizer", "policy") and number.isdecimal() and int(number) <= version:
                self.drop(int(number))

    def drop(self, version: int) -> None:
        """Take away a version's weights and optimizer; where there are none, nothing."""
        policy = self.policy(version)
        with contextlib.suppress(FileNotFoundError):
            for file in sharedfs.list_dir(policy):
                sharedfs.unlink(policy / file)
            policy.rmdir()
        sharedfs.unlink(self.optimizer(version))


def read_state(places: Places) -> State | None:
    """The state that was left; None where training has not begun.

    Raises:
        TrainError: another version's, or damaged.
    """
    try:
        content = sharedfs.read_bytes(places.state)
    except FileNotFoundError:
        return None
    try:
        state = msgspec.json.decode(content, type=State)
    except msgspec.MsgspecError as error:
        raise TrainError(f"{places.state}: cannot be read ({error}); train in another run directory") from error
    if state.v != VERSION:
        raise TrainError(f"{places.state}: is of version {state.v}, this trainer writes {VERSION}")
    return state


def write_state(places: Places, state: State) -> None:
    """Make an update count; weights and optimizer are on disk before."""
    sharedfs.write_atomic(places.state, msgspec.json.encode(state))


COLUMNS = tuple(field for field in Record.__struct_fields__ if field != "groups")


def table_text(records: list[Record]) -> str:
    """report/train.csv: a line an update, empty where nothing was measured."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records:
        writer.writerow([_cell(getattr(record, name)) for name in COLUMNS])
    return buffer.getvalue()


def _cell(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
