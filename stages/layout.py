"""Every path of a run directory and of the store, computed in one place, and the numbers read back from file names.

Epochs and parts are zero-padded so that people see them sorted; code compares the parsed numbers, never the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from stages.errors import ManifestError, ShardError

_MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_PART = re.compile(r"(\d{6,})-(\d{6,})")
_NUMBERED = re.compile(r"(.+)-(\d+)")


def _part_name(epoch: int, part: int) -> str:
    return f"{epoch:06d}-{part:06d}"


def _safe(name: str, what: str) -> str:
    if not _MEMBER.fullmatch(name):
        raise ManifestError(f"{what} {name!r} cannot be part of a file name: use letters, digits, '-', '_' and '.'")
    return name


def parse_part(name: str, suffix: str = "") -> tuple[int, int] | None:
    """(epoch, part) of a journal or payload file name, or with its suffix of an index part or a snapshot.

    None for any other name.
    """
    stem = name.removesuffix(suffix)
    match = _PART.fullmatch(stem)
    return (int(match[1]), int(match[2])) if match and stem + suffix == name else None


def parse_numbered(name: str, suffix: str) -> tuple[str, int] | None:
    """(member, n) of a segment (".seg") or shard (".arrows") file name, or None for any other name."""
    stem = name.removesuffix(suffix)
    match = _NUMBERED.fullmatch(stem)
    return (match[1], int(match[2])) if match and stem + suffix == name else None


@dataclass(frozen=True)
class RunLayout:
    """The paths of one run directory (docs/contracts.md)."""

    root: Path

    @property
    def manifest(self) -> Path:
        """Written last at launch: its existence means that the directory is complete."""
        return self.root / "manifest.json"

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.root / "config.yaml"

    @property
    def router_json(self) -> Path:
        """Where the router is; replaced atomically with a beat."""
        return self.root / "router.json"

    @property
    def members(self) -> Path:
        """Directory of the live processes' files."""
        return self.root / "members"

    def member(self, member: str) -> Path:
        """The file of one live process."""
        return self.members / f"{_safe(member, 'member id')}.json"

    @property
    def control(self) -> Path:
        """Directory of requests by file."""
        return self.root / "control"

    def control_request(self, name: str) -> Path:
        """One request by file, e.g. "drain" or "cancel-<id>"."""
        return self.control / f"{_safe(name, 'control request')}.json"

    @property
    def journal(self) -> Path:
        """Directory of the journal's parts."""
        return self.root / "journal"

    def journal_part(self, epoch: int, part: int) -> Path:
        """One append-only part of an epoch's journal."""
        return self.journal / _part_name(epoch, part)

    def snapshot(self, epoch: int, number: int) -> Path:
        """The `number`-th snapshot that an epoch's router took of its ledger."""
        return self.journal / f"{_part_name(epoch, number)}.snapshot"

    def epoch_claim(self, epoch: int) -> Path:
        """The name that a router hard-links into place to claim an epoch."""
        return self.journal / f"{epoch:06d}.claim"

    @property
    def payloads(self) -> Path:
        """Directory of task rows by digest."""
        return self.journal / "payloads"

    def payloads_part(self, epoch: int, part: int) -> Path:
        """One append-only part of an epoch's payloads."""
        return self.payloads / _part_name(epoch, part)

    @property
    def handoff(self) -> Path:
        """Directory of RUN's segments."""
        return self.root / "handoff"

    def segment(self, member: str, number: int) -> Path:
        """The `number`-th segment of a RUN worker incarnation."""
        return self.handoff / f"{_safe(member, 'member id')}-{number}.seg"

    @property
    def shards(self) -> Path:
        """Directory of EVAL's shards."""
        return self.root / "shards"

    def shard(self, member: str, number: int) -> Path:
        """The `number`-th shard of an EVAL worker incarnation."""
        return self.shards / f"{_safe(member, 'member id')}-{number}.arrows"

    def schema(self, version: int = 1) -> Path:
        """The schema message alone, for readers in other languages."""
        return self.shards / f"schema-v{version}.arrow"

    @property
    def index(self) -> Path:
        """Directory of the index that trainers tail."""
        return self.root / "index"

    def index_part(self, epoch: int, part: int) -> Path:
        """One append-only part of an epoch's index."""
        return self.index / f"{_part_name(epoch, part)}.jsonl"

    @property
    def failures(self) -> Path:
        """Derived: one line a rollout that did not complete."""
        return self.root / "failures.jsonl"

    def attempt_logs(self, attempt: int) -> Path:
        """Log directory of one start of the run."""
        return self.root / "logs" / f"attempt_{attempt}"

    @property
    def slurm(self) -> Path:
        """Batch scripts and Slurm's own output."""
        return self.root / "slurm"

    @property
    def secrets(self) -> Path:
        """Directory of tokens and keys."""
        return self.root / "secrets"

    @property
    def trainer_token(self) -> Path:
        """Bearer token of trainers."""
        return self.secrets / "trainer.token"

    @property
    def worker_token(self) -> Path:
        """Bearer token of workers."""
        return self.secrets / "worker.token"

    @property
    def engine_token(self) -> Path:
        """Bearer token of the run's own engines; absent where the fleet is external."""
        return self.secrets / "engine.token"

    @property
    def callback_key(self) -> Path:
        """Key that signs callbacks."""
        return self.secrets / "callback.key"

    @property
    def report(self) -> Path:
        """Directory of what the run leaves for people."""
        return self.root / "report"

    @property
    def summary(self) -> Path:
        """Counts, mean reward, rates and timings."""
        return self.report / "summary.json"

    @property
    def directories(self) -> tuple[Path, ...]:
        """What must exist before the manifest is written, parents first."""
        return (
            self.root, self.members, self.control, self.journal, self.payloads, self.handoff, self.shards,
            self.index, self.root / "logs", self.slurm, self.secrets, self.report,
        )  # fmt: skip

    def relative(self, path: Path) -> str:
        """The path as records name it: relative to the run directory, with slashes."""
        return path.relative_to(self.root).as_posix()

    def resolve(self, relative: str) -> Path:
        """The file that a record names.

        Raises:
            ShardError: the name is absolute or leads out of the run directory.
        """
        parts = PurePosixPath(relative).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ShardError(f"path {relative!r} is not inside the run directory {self.root}", path=relative)
        return self.root.joinpath(*parts)


@dataclass(frozen=True)
class StoreLayout:
    """The paths of the store that runs share: layers, images and wheels by digest."""

    root: Path

    @property
    def layer_keys(self) -> Path:
        """Directory of layer keys."""
        return self.root / "layers" / "keys"

    @property
    def layer_blobs(self) -> Path:
        """Directory of packed layers."""
        return self.root / "layers" / "blobs"

    def layer_key(self, key: str) -> Path:
        """Which digest an environment key has."""
        return self.layer_keys / f"{_safe(key, 'layer key')}.json"

    def layer_blob(self, sha256: str) -> Path:
        """The packed layer of a digest, given in hexadecimal without a prefix."""
        return self.layer_blobs / f"{_safe(sha256, 'layer digest')}.tar.zst"

    @property
    def images(self) -> Path:
        """Directory of images."""
        return self.root / "images"

    @property
    def image_names(self) -> Path:
        """Directory of the images' names."""
        return self.images / "names"

    @property
    def turns(self) -> Path:
        """Directory of the lock files of those who unpack now."""
        return self.root / "turns"

    @property
    def users(self) -> Path:
        """Directory of the runs that use the store, a file each."""
        return self.root / "users"

    def image_name(self, name: str) -> Path:
        """Which digest an image name has; a name may hold slashes and colons, a file name may not."""
        return self.image_names / f"{quote(name, safe='')}.json"

    def image_blob(self, sha256: str) -> Path:
        """The packed root file system of a digest, given in hexadecimal without a prefix."""
        return self.images / f"{_safe(sha256, 'image digest')}.tar.zst"

    def image_config(self, sha256: str) -> Path:
        """What is known of an image beside its files."""
        return self.images / f"{_safe(sha256, 'image digest')}.json"

    @property
    def wheels(self) -> Path:
        """Directory of wheels."""
        return self.root / "wheels"

    @property
    def directories(self) -> tuple[Path, ...]:
        """What must exist before the store is used, parents first."""
        return (
            self.root, self.layer_keys, self.layer_blobs, self.images, self.image_names, self.wheels, self.users,
        )  # fmt: skip
