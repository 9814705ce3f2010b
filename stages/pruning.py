"""What may leave a store: layers and images that nothing names, unused for long, or above a quota; none in use.

A file's time of change is its last use: who finds a layer by its key, unpacks it, or takes an image for a run, touches
its blob. Runs register with the store: whatever was touched since the oldest run began that has not ended stays.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import msgspec

from sandbox.errors import ImageError
from stages import sharedfs, storefs
from stages.layout import RunLayout, StoreLayout
from stages.summary import summary_state

GRACE_S = 3600.0
"""What was touched so shortly ago is left alone: an import or a commit may be about to name it; clocks differ."""
LEFTOVER_S = 24 * 3600.0
ABANDONED_S = 14 * 24 * 3600.0
"""A run that has not ended and whose router left no sign for so long holds nothing any more."""
_ENDED = frozenset({"completed", "failed", "cancelled"})

Kind = Literal["layer", "image", "name", "leftover"]


class Use(msgspec.Struct, frozen=True):
    """users/<digest of the run directory>.json: a run that uses this store, and since when (seconds since 1970)."""

    run_dir: str
    since: float


class Pruned(msgspec.Struct, frozen=True):
    """One thing that leaves: what it is, its digest or name, its bytes, seconds since its last use, and why."""

    kind: Kind
    name: str
    size_bytes: int
    unused_s: float
    why: str


class Wish(msgspec.Struct, frozen=True):
    """What is to leave beside what nothing names.

    Args:
        names: of images that are no longer wanted.
        older_than_s: layers unused for longer; None: however long.
        quota_bytes: layers, the least recently used first, until layers and images together take no more; None: none.
    """

    names: Sequence[str] = ()
    older_than_s: float | None = None
    quota_bytes: int | None = None


class _Blob(msgspec.Struct):
    kind: Kind
    digest: str
    path: Path
    used: float
    size: int
    named_by: list[Path]


def register(layout: StoreLayout, run_dir: Path) -> None:
    """Say that a run uses the store; the first time that it does so counts."""
    name = hashlib.sha256(str(run_dir).encode()).hexdigest()[:32]
    path = layout.users / f"{name}.json"
    if sharedfs.exists(path):
        return
    private = sharedfs.temp_beside(path)
    sharedfs.create_exclusive(private, msgspec.json.encode(Use(str(run_dir), time.time())))
    try:
        sharedfs.link(private, path)
    finally:
        sharedfs.unlink(private)


def users(layout: StoreLayout, now: float) -> list[Use]:
    """The runs that have not ended and that began or left a sign within two weeks."""
    found = []
    for name in _listed(layout.users):
        path = layout.users / name
        try:
            use = msgspec.json.decode(sharedfs.read_bytes(path), type=Use)
        except (OSError, msgspec.MsgspecError):
            continue
        run = RunLayout(Path(use.run_dir))
        sign = storefs.last_change(run.router_json) or storefs.last_change(run.manifest)
        seen = use.since if sign is None else sign[0]  # one that has just begun has written nothing yet
        if now - seen < ABANDONED_S and summary_state(run) not in _ENDED:
            found.append(use)
    return found


def prune(layout: StoreLayout, wish: Wish, *, dry_run: bool = False, now: float | None = None) -> Iterator[Pruned]:
    """Remove what may leave, and tell of each thing; with `dry_run` only tell.

    Raises:
        ImageError: an image that is named is not there, or in use; nothing was removed then.
        OSError: the store cannot be read or written.
    """
    now = time.time() if now is None else now
    using = users(layout, now)
    since = min((use.since for use in using), default=now) - GRACE_S
    blobs = [*_layers(layout), *_images(layout)]
    leaving = [_name(layout, name, blobs, since, using) for name in wish.names]
    asked: set[str] = set()
    for path, record in leaving:
        for blob in blobs:
            if path in blob.named_by:
                asked.add(blob.digest)
                blob.named_by = [other for other in blob.named_by if other != path]
        yield msgspec.structs.replace(record, unused_s=round(now - record.unused_s, 1))
        if not dry_run:
            sharedfs.unlink(path)
    total = sum(blob.size for blob in blobs)
    for blob in sorted(blobs, key=lambda one: one.used):
        if blob.used >= since and not (blob.digest in asked and not blob.named_by):
            continue
        why = _why(blob, wish, now, total)
        if why is None:
            continue
        again = storefs.last_change(blob.path)
        if again is None or again[0] != blob.used:
            continue
        total -= blob.size
        yield Pruned(blob.kind, blob.digest, blob.size, round(now - blob.used, 1), why)
        if not dry_run:
            for path in (*blob.named_by, *_beside(layout, blob), blob.path):
                sharedfs.unlink(path)
    yield from _leftovers(layout, now, dry_run=dry_run)


def _why(blob: _Blob, wish: Wish, now: float, total: int) -> str | None:
    if not blob.named_by:
        return "no name means it" if blob.kind == "image" else "no key means it"
    if blob.kind == "image":
        return None
    if wish.older_than_s is not None and now - blob.used > wish.older_than_s:
        return "not used for longer than asked"
    if wish.quota_bytes is not None and total > wish.quota_bytes:
        return "the store is above its quota"
    return None


def _name(
    layout: StoreLayout, name: str, blobs: list[_Blob], since: float, using: list[Use]
) -> tuple[Path, Pruned]:  # fmt: skip
    """An image's name that is to go, and what will be told of it; `unused_s` is still the time of its last use."""
    path = layout.image_name(name)
    blob = next((one for one in blobs if path in one.named_by), None)
    if blob is None:
        raise ImageError(f"no image {name!r} in {layout.images}: see rollmill images list", boundary="images")
    if using and blob.used >= since:
        runs = ", ".join(use.run_dir for use in using[:3])
        raise ImageError(f"{name} may be in use by {runs}: prune it when the run has ended", boundary="images")
    return path, Pruned("name", name, 0, blob.used, "asked for")


def _layers(layout: StoreLayout) -> list[_Blob]:
    return _blobs("layer", layout.layer_blobs, layout.layer_keys)


def _images(layout: StoreLayout) -> list[_Blob]:
    return _blobs("image", layout.images, layout.image_names)


def _blobs(kind: Kind, directory: Path, names: Path) -> list[_Blob]:
    named: dict[str, list[Path]] = {}
    for name in _listed(names):
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            meaning = msgspec.json.decode(sharedfs.read_bytes(names / name), type=_Meaning)
        except FileNotFoundError:
            continue
        except msgspec.MsgspecError as error:
            raise ImageError(
                f"{names / name} is damaged: {error}: remove it, what it named is then pruned too", boundary="images"
            ) from error
        named.setdefault(meaning.digest, []).append(names / name)
    found = []
    for name in _listed(directory):
        change = storefs.last_change(directory / name) if name.endswith(".tar.zst") and name[0] != "." else None
        if change is not None:
            digest = f"sha256:{name.removesuffix('.tar.zst')}"
            found.append(_Blob(kind, digest, directory / name, change[0], change[1], named.get(digest, [])))
    return found


class _Meaning(msgspec.Struct):
    """What keys and names have in common."""

    digest: str


def _beside(layout: StoreLayout, blob: _Blob) -> list[Path]:
    return [layout.image_config(blob.digest.removeprefix("sha256:"))] if blob.kind == "image" else []


def _leftovers(layout: StoreLayout, now: float, *, dry_run: bool) -> Iterator[Pruned]:
    """Temporary files of writers that died."""
    for directory in (layout.layer_keys, layout.layer_blobs, layout.images, layout.image_names, layout.users):
        for name in _listed(directory):
            change = storefs.last_change(directory / name) if name[0] == "." and name.endswith(".tmp") else None
            if change is None or now - change[0] < LEFTOVER_S:
                continue
            yield Pruned("leftover", unquote(name), change[1], round(now - change[0], 1), "its writer has died")
            if not dry_run:
                sharedfs.unlink(directory / name)


def _listed(directory: Path) -> list[str]:
    try:
        return sharedfs.list_dir(directory)
    except FileNotFoundError:
        return []
