"""What hidden tests compare by does not disturb them: the containers that they look into may change by themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from workflows.tasks.swe.equality import Look


class Garbage:
    """A cycle that takes one entry out of a dictionary whenever it is collected, and leaves another of its kind."""

    def __init__(self, names: dict[str, object]) -> None:
        self.me, self.names = self, names

    def __del__(self) -> None:
        if len(self.names) > 1:
            self.names.popitem()
            Garbage(self.names)


@pytest.fixture
def collected_at_every_turn() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    gc.collect()


def test_a_dictionary_may_shrink_while_it_is_looked_into(collected_at_every_turn: None) -> None:
    """As sys.modules does, where modules take themselves out of it when they are collected."""
    names: dict[str, object] = {str(number): object() for number in range(900)}
    Garbage(names)
    look = Look(any_is_used=False)
    for _ in range(20):
        assert look.within("0", names)
    assert len(names) < 900
    names.clear()
