"""The guest: what becomes of a test that counts and of its canary, and what its comparisons refuse."""

from __future__ import annotations

import inspect
import random
import sys
import weakref
from typing import Any
from unittest import mock

import pytest

from workflows.tasks.swe import equality, guest

SOURCE = b'''
import unittest

def test_plain():
    assert 1 + 1 == 2

def test_documented():
    """Only this."""

def test_loop():
    for number in range(3):
        if number == 5:
            return
    assert number == 2

async def test_async():
    pass

class TestThings:
    def test_method(self):
        assert [1] == [1]

class TestOld(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(1, 1)

def helper():
    return 1
'''
NAMES = {"test_plain", "test_documented", "test_loop", "test_async", "test_method", "test_equal"}


def made(seed: int, *, canary: bool, source: bytes = SOURCE) -> tuple[dict[str, Any], set[str]]:
    code, changed = guest.compiled(
        source, "t.py", dict.fromkeys(NAMES, canary), random.Random(seed), equality.Look(False)
    )
    module: dict[str, Any] = {"__name__": "t"}
    exec(code, module)
    return module, changed


def run(module: dict[str, Any], name: str) -> None:
    if name == "test_method":
        module["TestThings"]().test_method()
    elif name == "test_equal":
        module["TestOld"]("test_equal").test_equal()
    elif name == "test_async":
        with pytest.raises(StopIteration):
            module[name]().send(None)
    else:
        module[name]()


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("seed", range(4))
def test_a_test_that_counts_passes_and_its_canary_does_not(name: str, seed: int) -> None:
    module, changed = made(seed, canary=False)
    run(module, name)
    module, also_changed = made(seed, canary=True)
    assert changed == also_changed == NAMES
    with pytest.raises(AssertionError):
        run(module, name)


@pytest.mark.parametrize("name", ["test_plain", "test_loop"])
def test_an_emptied_body_does_not_pass(name: str) -> None:
    module, _ = made(1, canary=False)
    run(module, name)
    inspect.unwrap(module[name]).__code__ = (lambda: None).__code__
    with pytest.raises(AssertionError):
        run(module, name)


def test_nothing_that_tests_compare_by_has_a_name() -> None:
    module, _ = made(1, canary=False)
    assert not [name for name, value in module.items() if isinstance(value, equality.Look)]
    assert any(isinstance(value, equality.Look) for value in inspect.unwrap(module["test_plain"]).__code__.co_consts)


def test_each_return_is_an_end() -> None:
    source = (
        b"def test_plain(n=0):\n    for i in range(3):\n        try:\n            if n == i:\n                return\n"
        b"        finally:\n            pass\n    def inner():\n        return 1\n    if inner():\n        return\n"
    )
    for number in (0, 2, 7):
        made(1, canary=False, source=source)[0]["test_plain"](number)
        with pytest.raises(AssertionError):
            made(1, canary=True, source=source)[0]["test_plain"](number)


def test_a_class_of_the_hidden_tests_may_equal_what_it_likes() -> None:
    source = (
        b"class Like:\n    def __eq__(self, other):\n        return True\n\n"
        b"def test_plain(value):\n    assert value == 5\n"
    )
    module, _ = made(1, canary=False, source=source)
    module["test_plain"](module["Like"]())
    with pytest.raises(AssertionError, match="claims"):
        module["test_plain"](Anything())


def test_what_claims_to_hold_everything_holds_nothing() -> None:
    class Holds(list[Any]):
        def __contains__(self, other: object) -> bool:
            return True

    look = equality.Look(False)
    with pytest.raises(AssertionError, match="hold"):
        look.within("b", Holds())
    assert look.within("b", ["b"]) and not look.within("b", {}) and look.within("b", "abc")


def test_helpers_stay_as_they_are() -> None:
    module, _ = made(1, canary=True)
    assert module["helper"]() == 1


def test_a_canary_does_what_the_test_does_and_keeps_none_of_it_alive() -> None:
    source = (
        b"def test_plain(done, make):\n    made = make()\n    done.append(1)\n    assert made is not None\n    return\n"
    )
    done: list[int] = []
    made_ones: list[weakref.ref[Any]] = []

    def make() -> Any:
        thing = Version("1")
        made_ones.append(weakref.ref(thing))
        return thing

    module, _ = made(1, canary=True, source=source)
    with pytest.raises(AssertionError) as raised:
        module["test_plain"](done, make)
    assert done == [1] and made_ones[0]() is None and raised.value.__traceback__ is not None


def test_marks_and_signature_are_the_tests_own() -> None:
    source = b"import pytest\n@pytest.mark.parametrize('n', [1])\ndef test_plain(n, tmp_path):\n    assert n == 1\n"
    module, _ = made(1, canary=False, source=source)
    assert list(inspect.signature(module["test_plain"]).parameters) == ["n", "tmp_path"]
    assert [mark.name for mark in module["test_plain"].pytestmark] == ["parametrize"]


def test_line_numbers_are_the_files_own() -> None:
    module, _ = made(1, canary=False)
    lines = {number for _, _, number in inspect.unwrap(module["test_loop"]).__code__.co_lines() if number}
    first = SOURCE.decode().splitlines().index("def test_loop():") + 1
    assert lines == set(range(first, first + 5))


class Anything:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Stateful(Anything):
    """Equal when it is asked first, and not again."""

    asked = 0

    def __eq__(self, other: object) -> bool:
        self.asked += 1
        return self.asked == 1


class AnyList(list[Any]):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, list)


class AnyText(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("liar", [Anything(), AnyList(), AnyText("x"), mock.ANY])
@pytest.mark.parametrize("wanted", [5, 1.5, "text", b"x", [1], (1,), {1}, {"a": 1}, None, object()])
def test_what_equals_everything_equals_nothing(liar: Any, wanted: Any) -> None:
    if isinstance(liar, AnyList) and not isinstance(wanted, list):
        return  # it does not claim that
    for sides in ((liar, wanted), (wanted, liar), ([liar], [wanted]), ({"k": liar}, {"k": wanted})):
        with pytest.raises(AssertionError, match="claims"):
            equality.Look(False)(*sides, True)


def test_a_liar_that_counts_its_questions_is_caught_half_of_the_time_and_more() -> None:
    caught = 0
    for _ in range(40):
        try:
            caught += not equality.Look(False)(Stateful(), 5, True)
        except AssertionError:
            caught += 1
    assert caught > 8


class Version:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return str(other) == self.text

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return 0


class Raising:
    def __eq__(self, other: object) -> bool:
        raise TypeError("never")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, 1, True), ([1, [2]], [1, [2]], True), (Version("1"), "1", True), ("1", Version("1"), True),
        (Version("1"), Version("1"), True), (Version("1"), "2", False), (1.0, pytest.approx(1.0), True),
        (mock.call(1), mock.call(1), True), ({"a": Version("1")}, {"a": "1"}, True), (int, int, True),
    ],
)  # fmt: skip
def test_honest_values_are_compared_as_ever(left: Any, right: Any, equal: bool) -> None:
    for _ in range(4):
        assert equality.Look(False)(left, right, True) is equal
        assert equality.Look(False)(left, right, False) == (left, right)


def test_a_tests_own_any_is_honest_and_what_raises_raises_where_it_did() -> None:
    assert equality.Look(True)({"a": 1}, {"a": mock.ANY}, True)
    with pytest.raises(TypeError, match="never"):
        equality.Look(False)(Raising(), 1, True)


class Own(list[Any]):
    pass


class OfItsLength(list[Any]):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and len(other) == len(self)


@pytest.mark.parametrize("liar", [Own([Anything()]), OfItsLength([5])])
def test_lists_of_ones_own_are_looked_into(liar: Any) -> None:
    with pytest.raises(AssertionError, match="claims"):
        equality.Look(False)(liar, [7], True)
    assert equality.Look(False)(Own([7]), [7], True)


def test_a_module_that_is_blocked_by_none_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projects test without an optional library by `sys.modules[name] = None`."""
    whole = guest.state_of_runner([], [])
    monkeypatch.setitem(sys.modules, "pluggy.blocked", None)
    assert guest.state_of_runner([], []) == whole
    monkeypatch.setitem(sys.modules, "_pytest.runner", None)
    found = guest.state_of_runner([], [])
    assert "_pytest.runner.runtestprotocol" in whole and "_pytest.runner.runtestprotocol" not in found
