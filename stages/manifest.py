"""The manifest: what makes a directory a run directory. Written last at launch, so its existence means complete."""

from __future__ import annotations

import secrets
import time
from typing import Final, Literal

import msgspec

from stages import sharedfs
from stages.errors import ManifestError
from stages.layout import RunLayout

SCHEMA: Final = 1


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json. `config_digest` decides whether a second start may go on with this directory."""

    run_id: str
    schema: int
    config_digest: str
    code_version: str
    created_at: float


class Opened(msgspec.Struct, frozen=True):
    """What a start found: a new run, one to resume, or one that has ended."""

    manifest: Manifest
    state: Literal["new", "resumed", "finished"]


def read(layout: RunLayout) -> Manifest | None:
    """The manifest, or None where there is none.

    Raises:
        ManifestError: not a manifest, or one of a newer version.
    """
    try:
        manifest = msgspec.json.decode(sharedfs.read_bytes(layout.manifest), type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{layout.manifest} is damaged: {error}; start in another run_dir") from error
    if manifest.schema > SCHEMA:
        raise ManifestError(
            f"{layout.manifest}: schema version {manifest.schema}, this rollmill knows {SCHEMA}: use a newer rollmill"
        )
    return manifest


def open_run(layout: RunLayout, config_yaml: str, config_digest: str, code_version: str) -> Opened:
    """Make the run directory, or find out how the run in it stands.

    Raises:
        ManifestError: the directory is another config's, holds something else, or cannot be written.
    """
    manifest = read(layout)
    if manifest is None:
        manifest = _create(layout, config_yaml, config_digest, code_version)
        return Opened(manifest, "new")
    if manifest.config_digest != config_digest:
        raise ManifestError(
            f"{layout.root} holds run {manifest.run_id} of another config ({layout.config} has it): "
            "give another run_dir, or the config of that run"
        )
    if sharedfs.exists(layout.summary) and _has_ended(layout):
        return Opened(manifest, "finished")
    return Opened(manifest, "resumed")


def _has_ended(layout: RunLayout) -> bool:
    """Whether there is nothing left to do: what failed or was requeued goes on, what was cancelled does not."""
    summary = msgspec.json.decode(sharedfs.read_bytes(layout.summary))
    return isinstance(summary, dict) and summary.get("state") in {"completed", "cancelled"}


def _create(layout: RunLayout, config_yaml: str, config_digest: str, code_version: str) -> Manifest:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    manifest = Manifest(f"rm-{stamp}-{secrets.token_hex(2)}", SCHEMA, config_digest, code_version, time.time())
    try:
        _refuse_foreign(layout)
        for directory in layout.directories:
            sharedfs.make_dirs(directory)
        sharedfs.write_atomic(layout.config, config_yaml.encode())
        sharedfs.write_atomic(layout.manifest, msgspec.json.encode(manifest))
    except OSError as error:
        reason = f"{error.strerror or error}"
        raise ManifestError(f"run_dir {layout.root} cannot be written: {reason}; give another run_dir") from error
    return manifest


def _refuse_foreign(layout: RunLayout) -> None:
    """A directory without a manifest may be an earlier start's that did not get far, but nobody else's."""
    if not sharedfs.exists(layout.root):
        return
    ours = {path.relative_to(layout.root).parts[0] for path in layout.directories if path != layout.root}
    ours |= {layout.config.name, layout.manifest.name}
    foreign = [name for name in sharedfs.list_dir(layout.root) if name not in ours and not name.endswith(".tmp")]
    if foreign:
        raise ManifestError(
            f"run_dir {layout.root} is not empty and no run directory (it holds {foreign[0]!r}): give another run_dir"
        )


def last_attempt(layout: RunLayout) -> int:
    """The number of the newest start, 1 where there was none yet."""
    attempt = 1
    while sharedfs.exists(layout.attempt_logs(attempt + 1)):
        attempt += 1
    return attempt


def begin_attempt(layout: RunLayout) -> int:
    """The number of this start of the run, 1 or more, with a log directory of its own.

    Raises:
        ManifestError: the log directory cannot be made.
    """
    attempt = 1
    while sharedfs.exists(layout.attempt_logs(attempt)):
        attempt += 1
    try:
        sharedfs.make_dirs(layout.attempt_logs(attempt))
    except OSError as error:
        raise ManifestError(f"{layout.attempt_logs(attempt)} cannot be made: {error.strerror}") from error
    return attempt
