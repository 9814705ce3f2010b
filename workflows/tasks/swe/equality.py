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
    """Sends every comparison for equality through a look at both sides: see `Look`.

    Args:
        look: a constant that stands for a `Look`.
        within: one that stands for its `within`.
    """

    def __init__(self, look: str, within: str) -> None:
        self._look, self._within = look, within

    def _call(self, where: ast.expr, same: bool, *sides: ast.expr) -> ast.expr:
        call = ast.Call(func=ast.Constant(self._look), args=[*sides, ast.Constant(same)], keywords=[])
        return ast.fix_missing_locations(ast.copy_location(call, where))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """`a == b` and `a in b`; chains are left as they are."""
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            return self._call(node, True, node.left, node.comparators[0])
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.In):
            within = ast.Call(func=ast.Constant(self._within), args=[node.left, node.comparators[0]], keywords=[])
            return ast.fix_missing_locations(ast.copy_location(within, node))
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

    __slots__ = ("_any", "_any_is_used", "_base", "_dice", "_number", "_text", "trusted")

    def __init__(self, any_is_used: bool) -> None:
        from unittest import mock

        # Its own dice: tests may have seeded the common ones.
        self._dice = random.Random(os.urandom(16))  # noqa: S311
        self._any, self._any_is_used = type(mock.ANY), any_is_used
        self._number, self._text = self._dice.getrandbits(60), f"{self._dice.getrandbits(60):x}"
        self._base: Any = object.__eq__
        self.trusted: list[types.CodeType] = []
        """Code of the hidden tests themselves, whose classes may equal what they like."""

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

    def within(self, item: Any, container: Any) -> Any:
        """`item in container`."""
        kind = type(container)
        if kind not in PLAIN and kind not in CONTAINERS and hasattr(kind, "__contains__"):
            self._check(container, None, 3)
            # Some hold every text, as a wildcard does; what holds every object lies.
            strangers = self._strangers(None)[0]
            if not self._is_hidden(kind.__contains__) and self._all(lambda one: one in container, strangers):
                raise AssertionError("a value claims to hold what it does not")
        elif kind in CONTAINERS:
            self._check(container, None, 3)
        return item in container

    def _check(self, value: Any, other: Any, depth: int) -> None:
        kind = type(value)
        if kind in PLAIN:
            return
        base = next((one for one in CONTAINERS if issubclass(kind, one)), None)
        if kind is not base and self._lies(value, other):
            raise AssertionError("a value claims to equal what it does not")
        if base is not None and depth and base.__len__(value) <= 1000:
            alike = issubclass(type(other), base)
            for key, item in self._items(base, value):
                beside = None
                if alike and base is dict:
                    beside = dict.get(other, key)
                elif alike and base in (list, tuple) and key < base.__len__(other):
                    beside = base.__getitem__(other, key)
                self._check(item, beside, depth - 1)

    @staticmethod
    def _items(base: Any, value: Any) -> list[tuple[Any, Any]]:
        """Of a copy, made at one go: garbage that is collected meanwhile may take itself out of a dictionary."""
        if base is dict:
            return list(dict.copy(value).items())
        return list(enumerate(base.__iter__(set.copy(value) if base is set else value)))

    def _lies(self, value: Any, other: Any) -> bool:
        kind = type(value)
        if kind is self._any:
            return not self._any_is_used
        if kind.__eq__ is self._base or self._is_hidden(kind.__eq__):
            return False
        try:
            groups = self._strangers(other)
        except Exception:  # noqa: BLE001 - of a number that cannot be added to, for one
            groups = self._strangers(None)
        return any(self._all(lambda one: value == one, group) for group in groups)

    def _is_hidden(self, function: Any) -> bool:
        """Whether a method was written in the hidden tests, which no agent has seen."""
        code = getattr(function, "__code__", None)
        return any(code is one for one in self.trusted)

    @staticmethod
    def _all(claims: Any, strangers: list[Any]) -> bool:
        try:
            return all(claims(stranger) for stranger in strangers)
        except Exception:  # noqa: BLE001 - a comparison may raise anything; it does not say "equal" then
            return False

    def _strangers(self, other: Any) -> list[list[Any]]:
        """Groups of values: who equals `other` does not equal all of one."""
        number, text, kind = self._number, self._text, type(other)
        if kind in (int, float) or kind.__name__ in ("Decimal", "Fraction"):
            return [[other + number if other + number != other else number]]
        if kind is bool:
            return [[other, not other]]
        if kind is str:
            return [[other + text], *([[(text * len(other))[: len(other)]]] if len(other) > 3 else [])]
        if kind is bytes:
            return [[other + text.encode()]]
        if kind is dict:
            return [[{**other, text: number}]]
        if kind in CONTAINERS:
            same_length = [[kind([text] * len(other))]] if other and kind in (list, tuple) else []
            return [[kind([*other, text])], *same_length]
        if kind.__name__ == "ApproxScalar" and type(other.expected) in (int, float):
            return [[kind(other.expected + number)]]
        return [[object(), number, text, [text], {text: number}]]
