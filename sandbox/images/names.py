"""How an image that a dataset or a registry names is called in a store. Pure.

Sources of the forms: SWE-bench's harness calls an instance's image `sweb.eval.ARCH.INSTANCE:TAG` where it builds it
itself, and NAMESPACE/ that with `__` as `_1776_` where it pulls it (Docker Hub takes no double underscore);
SWE-Gym's are `xingyaoww/sweb.eval.x86_64.INSTANCE` with `__` as `_s_`; SWE-rebench's are SWE-bench's in `swerebench/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_REGISTRIES = ("docker://", "docker.io/", "index.docker.io/", "registry-1.docker.io/", "library/")
_LATEST = ":latest"
_TAGGED = re.compile(r":[A-Za-z0-9_][A-Za-z0-9_.-]*$|@sha256:[0-9a-f]+$")
_INSTANCE = re.compile(r"([a-z][a-z-]*):([A-Za-z0-9][A-Za-z0-9._-]*__[A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class _Dataset:
    """How one dataset's images are called: before the instance, and what stands for its double underscore."""

    prefix: str
    joint: str


DATASETS = {
    "swebench": _Dataset("swebench/sweb.eval.{arch}.", "_1776_"),
    "swegym": _Dataset("xingyaoww/sweb.eval.{arch}.", "_s_"),
    "swerebench": _Dataset("swerebench/sweb.eval.{arch}.", "_1776_"),
}
"""What may stand before the colon of DATASET:INSTANCE."""
_LOCAL = "sweb.eval.{arch}."


def instance_image(dataset: str, instance: str, arch: str = "x86_64") -> str:
    """The name on Docker Hub, and so in a store, of a dataset instance's image.

    Args:
        dataset: one of `DATASETS`.
        instance: its id, as `django__django-11099`.
        arch: as the images call it: x86_64 or arm64.

    Raises:
        KeyError: no such dataset.
    """
    known = DATASETS[dataset]
    return known.prefix.format(arch=arch) + instance.lower().replace("__", known.joint)


def store_names(image: str, arch: str = "x86_64") -> list[str]:
    """The names under which a store may have an image, the likeliest first.

    Args:
        image: a store's name, a registry's (`docker.io/` and `:latest` may be there or not), or DATASET:INSTANCE with
            one of `DATASETS`.
        arch: for DATASET:INSTANCE.
    """
    found = _INSTANCE.fullmatch(image)
    if found is not None and found[1] in DATASETS:
        local = _LOCAL.format(arch=arch) + found[2].lower()
        return _tags(instance_image(found[1], found[2], arch)) + _tags(local)
    plain = image
    for registry in _REGISTRIES:
        plain = plain.removeprefix(registry)
    return list(dict.fromkeys([image, *_tags(plain), *_tags(image)]))


def _tags(name: str) -> list[str]:
    """With and without the tag that is meant where none is given."""
    if name.endswith(_LATEST):
        return [name, name.removesuffix(_LATEST)]
    return [name] if _TAGGED.search(name) else [name, name + _LATEST]
