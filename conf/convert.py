"""Strict conversion between plain data and the schema's dataclasses, with the full key in every refusal."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from conf.errors import ConfigError
from conf.limits import Words

T = TypeVar("T")


def structure(cls: type[T], data: object, key: str = "") -> T:
    """Make a `cls` of plain data; every key must be known, every value of its type and in its range.

    Raises:
        ConfigError: names the full key, what came and what is allowed.
    """
    if not isinstance(data, Mapping):
        raise _refuse(key or "the configuration", data, "a mapping of keys")
    hints = field_types(typing.cast("Any", cls))
    values = {}
    for name, value in data.items():
        full = _join(key, name)
        if name not in hints:
            raise unknown_key(full, (_join(key, known) for known in hints))
        values[name] = _value(hints[name], value, full)
    return cls(**values)


def plain(value: Any) -> Any:
    """The same configuration as dicts, lists and scalars, in the schema's order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type with its range, in the order of definition."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def allowed(hint: Any) -> str:
    """What a field of this type takes, in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(allowed(arg) for arg in args)
    if origin is typing.Annotated:
        base, bounds = _noun(args[0]), args[1]
        return str(bounds) if isinstance(bounds, Words) else f"{base} {bounds}"
    if origin is typing.Literal:
        return ", ".join(str(arg) for arg in args)
    if origin is list:
        return f"a list, each {allowed(args[0])}"
    return _noun(hint)


def unknown_key(full: str, known: Iterable[str]) -> ConfigError:
    """The refusal of a key that does not exist, with the nearest ones that do."""
    names = list(known)
    near = difflib.get_close_matches(full, names, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known there: {', '.join(sorted(names))}"
    return ConfigError(f"{full} is not a key: {hint}", key=full)


def _value(hint: Any, value: object, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        inner = next(arg for arg in args if arg is not type(None))
        try:
            return _value(inner, value, key)
        except ConfigError as error:
            if error.key != key:
                raise
            raise _refuse(key, value, allowed(hint)) from None
    if origin is typing.Annotated:
        return _bounded(hint, value, key)
    if origin is typing.Literal:
        # YAML reads a bare `none`, `on` or `off` as text or as a truth value, never as one of ours by accident.
        if value not in args or isinstance(value, bool):
            raise _refuse(key, value, allowed(hint))
        return value
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise _refuse(key, value, allowed(hint))
        return [_value(args[0], item, f"{key}[{place}]") for place, item in enumerate(value)]
    if origin is dict:
        return _open_mapping(value, key)
    if dataclasses.is_dataclass(hint):
        return structure(typing.cast("type[Any]", hint), value, key)
    return _scalar(hint, value, key)


def _scalar(hint: Any, value: object, key: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _refuse(key, value, "a number that a 64-bit float can hold") from None
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        # An account or tag of digits alone is a number to YAML and Hydra; both keep leading zeros as text.
        return str(value)
    if hint is Any or (isinstance(value, hint) and (hint is bool or not isinstance(value, bool))):
        return value
    raise _refuse(key, value, allowed(hint))


def _bounded(hint: Any, raw: object, key: str) -> Any:
    base, bounds = typing.get_args(hint)
    try:
        value = _scalar(base, raw, key)
    except ConfigError:
        raise _refuse(key, raw, allowed(hint)) from None
    if not bounds.holds(value):
        raise _refuse(key, raw, allowed(hint))
    return value


def _open_mapping(value: object, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _refuse(key, value, "a mapping of keys")
    for name in value:
        if not isinstance(name, str):
            raise _refuse(f"{key}.{name}", name, "text as key")
    return {str(name): plain(item) for name, item in value.items()}


def _refuse(key: str, value: object, wanted: str) -> ConfigError:
    shown = "null" if value is None else repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ConfigError(f"{key} got {shown} ({_kind(value)}); allowed: {wanted}", key=key, value=value)


def _kind(value: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "nothing"}
    return names.get(type(value), "a list" if isinstance(value, (list, tuple)) else "a mapping")


def _noun(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(hint, "a mapping of keys")


def _join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)
