"""Where each published line lies and which seq each id has: a few bytes for each rollout that has ended."""

from __future__ import annotations

from array import array
from typing import NamedTuple

_OFFSET_BITS = 40


def group_name(number: int) -> str:
    """The id of the `number`-th group of a run."""
    return f"g{number:06d}"


class Place(NamedTuple):
    """A line's file, as (epoch, part), and its first byte."""

    key: tuple[int, int]
    offset: int


class Places:
    """Line `seq` lies at `of(seq)`; seqs rise by one from 1."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._packed = array("Q")

    def __len__(self) -> int:
        return len(self._packed)

    def add(self, key: tuple[int, int], offsets: list[int]) -> None:
        """The next lines lie in this file, at these offsets."""
        if not self._keys or self._keys[-1] != key:
            self._keys.append(key)
        base = (len(self._keys) - 1) << _OFFSET_BITS
        self._packed.extend([base + offset for offset in offsets])

    def cut(self, length: int) -> None:
        """Forget the lines after the first `length`."""
        del self._packed[length:]

    def of(self, seq: int) -> Place:
        """Where a line lies; IndexError where it is not out."""
        packed = self._packed[seq - 1]
        return Place(self._keys[packed >> _OFFSET_BITS], packed & ((1 << _OFFSET_BITS) - 1))


class EndedIds:
    """Seqs by id. Ids are `g<number>` and `<group>-<i>`; once a group is closed a rollout costs 8 bytes."""

    def __init__(self) -> None:
        self._groups = array("Q")
        self._bases = array("Q")
        self._seqs = array("Q")
        self._open: dict[int, dict[int, int]] = {}

    def add_row(self, rollout_id: str, seq: int) -> None:
        """A rollout's line is out."""
        group, _, number = rollout_id.rpartition("-")
        self._open.setdefault(int(group[1:]), {})[int(number)] = seq

    def add_group(self, group_id: str, seq: int) -> None:
        """A group's line is out: those of all its rollouts came before."""
        number = int(group_id[1:])
        missing = number + 1 - len(self._groups)
        if missing > 0:
            self._groups.frombytes(bytes(8 * missing))
            self._bases.frombytes(bytes(8 * missing))
        rows = self._open.pop(number, {})
        self._groups[number] = seq
        self._bases[number] = len(self._seqs) << 20 | len(rows)
        self._seqs.extend([rows.get(i, 0) for i in range(len(rows))])

    def group(self, group_id: str) -> int | None:
        """The seq of a group's line, or None where it is not out."""
        number = _number(group_id[1:])
        if number is None or number >= len(self._groups) or group_name(number) != group_id:
            return None
        return self._groups[number] or None

    def rollout(self, rollout_id: str) -> int | None:
        """The seq of a rollout's line, or None where it is not out."""
        group_id, _, text = rollout_id.rpartition("-")
        number, i = _number(group_id[1:]), _number(text)
        if number is None or i is None or f"{group_name(number)}-{i}" != rollout_id:
            return None
        if number in self._open:
            return self._open[number].get(i)
        if number >= len(self._groups):
            return None
        base, count = divmod(self._bases[number], 1 << 20)
        return self._seqs[base + i] if i < count else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 16 else None
