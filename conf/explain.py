"""Every key with its type, default and sentence, read from the schema's own source for `--help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from conf.convert import allowed, field_types
from conf.schema import Config


@dataclass(frozen=True)
class Key:
    """One key as people see it; `section` is true for a key that only holds others."""

    name: str
    allowed: str
    default: Any
    sentence: str
    section: bool = False
    open: bool = False


def keys(prefix: str = "") -> list[Key]:
    """All keys whose full name is `prefix` or lies below it, in the schema's order."""
    return [key for key in _all() if not prefix or key.name == prefix or key.name.startswith(prefix + ".")]


def find(name: str) -> Key | None:
    """The key of this full name; None where there is none. A name below an open mapping finds the mapping."""
    for key in _all():
        if key.name == name or (key.open and name.startswith(key.name + ".")):
            return key
    return None


@cache
def _all() -> tuple[Key, ...]:
    return tuple(_walk(Config, Config(), ""))


def _walk(cls: type, defaults: Any, prefix: str) -> Iterator[Key]:
    sentences = _sentences(cls)
    for name, hint in field_types(cls).items():
        full = f"{prefix}.{name}" if prefix else name
        default = getattr(defaults, name)
        if dataclasses.is_dataclass(hint):
            yield Key(full, "keys", None, sentences.get(name, ""), section=True)
            yield from _walk(typing.cast("type", hint), default, full)
        else:
            is_open = typing.get_origin(hint) is dict
            yield Key(full, allowed(hint), default, sentences.get(name, ""), open=is_open)


@cache
def _sentences(cls: type) -> dict[str, str]:
    """Field name -> the text under it, over the class and those it extends."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(part):
            continue
        (tree,) = ast.parse(inspect.getsource(part)).body
        body = typing.cast("ast.ClassDef", tree).body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[typing.cast("ast.Name", field.target).id] = str(text.value.value)
    return found
