"""How hidden tests compare values: the text is sent to the guest, and nothing there may be believed to be what it says.

A class may define `__eq__` so that it equals whatever a test expects. A look at both sides of each comparison asks such
a value whether it equals also what the other side is not. Needs Python 3.8 in the sandbox.
"""

from __future__ import annotations

import ast
import os
import random
import types
from typing import Any

PLAIN = frozenset([int, float, complex, str, bytes, bytearray, bool, type(None), type, range, types.ModuleType])
CONTAINERS = (list, tuple, set, frozenset, dict)


class Equality(ast.NodeTransformer):
    """Sends every comparison for equality through a look at both sides: see `Look`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _call(self, where: ast.expr, same: bool, *sides: ast.expr) -> ast.expr:
        call = ast.Call(func=ast.Name(self._name, ast.Load()), args=[*sides, ast.Constant(same)], keywords=[])
        return ast.fix_missing_locations(ast.copy_location(call, where))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """`a == b`; chains are left as they are."""
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            return self._call(node, True, node.left, node.comparators[0])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The first two arguments of unittest's comparisons."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        plain = len(node.args) >= 2 and not any(isinstance(given, ast.Starred) for given in node.args)
        if name.startswith("assert") and "Equal" in name and "Not" not in name and plain:
            both = ast.Starred(self._call(node, False, node.args[0], node.args[1]), ast.Load())
            node.args[:2] = [ast.fix_missing_locations(ast.copy_location(both, node))]
        return node


class Look:
    """What tests compare by: it refuses a value that equals also what the other side is not.

    Args:
        any_is_used: the test module names unittest.mock.ANY, so that one may come from it.
    """

    def __init__(self, any_is_used: bool) -> None:
        from unittest import mock

        # Its own dice: tests may have seeded the common ones.
        self._dice = random.Random(os.urandom(16))  # noqa: S311
        self._any, self._any_is_used = type(mock.ANY), any_is_used
        self._number, self._text = self._dice.getrandbits(60), f"{self._dice.getrandbits(60):x}"
        self._base: Any = object.__eq__

    def __call__(self, left: Any, right: Any, same: bool) -> Any:
        """`left == right`, or both where `same` is false: then the caller compares."""
        # Before or after the comparison that counts: a value must not know it by how often it was asked.
        early = not same or self._dice.random() < 0.5
        if early:
            self._check(left, right, 3)
            self._check(right, left, 3)
        if not same:
            return left, right
        equal = left == right
        if not early:
            self._check(left, right, 3)
            self._check(right, left, 3)
        return equal

    def _check(self, value: Any, other: Any, depth: int) -> None:
        kind = type(value)
        if kind in PLAIN:
            return
        if kind not in CONTAINERS:
            if self._lies(value, other):
                raise AssertionError("a value claims to equal what it does not")
        elif depth and len(value) <= 1000:
            alike = type(other) is kind
            for key, item in list(value.items() if kind is dict else enumerate(value)):
                beside = None
                if alike and kind is dict:
                    beside = other.get(key)
                elif alike and kind in (list, tuple) and key < len(other):
                    beside = other[key]
                self._check(item, beside, depth - 1)

    def _lies(self, value: Any, other: Any) -> bool:
        kind = type(value)
        if kind is self._any:
            return not self._any_is_used
        if kind.__eq__ is self._base:
            return False
        try:
            return all(value == stranger for stranger in self._strangers(other))
        except Exception:  # noqa: BLE001 - a comparison may raise anything; it does not say "equal" then
            return False

    def _strangers(self, other: Any) -> list[Any]:
        """Values that nothing equals which equals `other`."""
        number, text, kind = self._number, self._text, type(other)
        if kind in (int, float):
            return [other + number]
        if kind is str:
            return [other + text]
        if kind is bytes:
            return [other + text.encode()]
        if kind is dict:
            return [{**other, text: number}]
        if kind in CONTAINERS:
            return [kind([*other, text])]
        return [object(), number, text, [text], {text: number}]
