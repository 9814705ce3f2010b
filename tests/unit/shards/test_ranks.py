"""Ranks: each group whole at one reader, the shares equal, the same after every restart; torch where it is there."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from stages.layout import RunLayout
from stages.shards import ShardGroup, ShardReader
from stages.shards.torch_dataset import as_dataset
from tests.unit.stages_files.samples import group_line, make_layout, make_row, publish, rows_line, write_rows

GROUPS, SIZE = 10, 3


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Ten groups of three whose rows come interleaved and whose groups close in reverse; odd ones are tagged."""
    layout = make_layout(tmp_path)
    rows = [make_row(n, group=f"g{n % GROUPS}", tag="odd" if n % GROUPS % 2 else "") for n in range(GROUPS * SIZE)]
    lines: list[Any] = [rows_line(n, *one) for n, one in enumerate(zip(rows, write_rows(layout, rows), strict=True), 1)]
    for number in reversed(range(GROUPS)):
        members = [row.rollout_id for row in rows if row.group_id == f"g{number}"]
        lines.append(group_line(len(lines) + 1, f"g{number}", members, "odd" if number % 2 else ""))
    publish(layout, lines)
    return layout


def of_rank(layout: RunLayout, rank: int, world: int, **options: Any) -> tuple[set[str], set[str]]:
    """Rollouts that iteration gives, and groups that `groups` gives."""
    with ShardReader(layout.root, rank=rank, world_size=world, **options) as reader:
        rows = {row.rollout_id for row in reader}
    with ShardReader(layout.root, rank=rank, world_size=world, **options) as reader:
        return rows, {group.line.group_id for group in reader.groups()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_whole_groups_evenly(layout: RunLayout, world: int) -> None:
    shares = [of_rank(layout, rank, world) for rank in range(world)]
    assert sorted(name for rows, _ in shares for name in rows) == sorted(f"r{n}" for n in range(GROUPS * SIZE))
    assert sorted(name for _, groups in shares for name in groups) == [f"g{n}" for n in range(GROUPS)]
    for rows, groups in shares:
        assert {f"g{int(name[1:]) % GROUPS}" for name in rows} == groups
    sizes = [len(groups) for _, groups in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_tag_is_shared_evenly_too(layout: RunLayout) -> None:
    shares = [of_rank(layout, rank, 2, tag="odd")[1] for rank in range(2)]
    assert sorted(map(len, shares)) == [2, 3] and set().union(*shares) == {f"g{n}" for n in range(1, GROUPS, 2)}


def test_a_rank_resumes_with_the_groups_that_it_had(layout: RunLayout) -> None:
    whole, _ = of_rank(layout, 1, 3)
    late, _ = of_rank(layout, 1, 3, after=20)
    assert late and late == {name for name in whole if int(name[1:]) >= 20}


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(layout: RunLayout, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of world_size {world}"):
        ShardReader(layout.root, rank=rank, world_size=world)


def _name(group: ShardGroup) -> str:
    return group.line.group_id


def test_the_dataset_divides_by_rank_and_by_loader_worker(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two names that it uses of torch in torch's place."""
    data: Any = types.ModuleType("torch.utils.data")
    data.IterableDataset = type("IterableDataset", (), {})
    for name, module in (("torch", None), ("torch.utils", None), ("torch.utils.data", data)):
        monkeypatch.setitem(sys.modules, name, module or types.ModuleType(name))
    seen = []
    for rank in range(2):
        for number in range(2):
            data.get_worker_info = lambda number=number: types.SimpleNamespace(id=number, num_workers=2)
            dataset = as_dataset(layout.root, transform=lambda group: group.line.group_id, rank=rank, world_size=2)
            assert isinstance(dataset, data.IterableDataset)
            seen.append(list(dataset))
    assert sorted(name for share in seen for name in share) == [f"g{n}" for n in range(GROUPS)]
    data.get_worker_info = lambda: None
    spawned = pickle.loads(pickle.dumps(as_dataset(layout.root, transform=_name, after=2, rank=1, world_size=2)))
    assert list(spawned) == list(as_dataset(layout.root, transform=_name, after=2, rank=1, world_size=2)) != []
    assert len(list(as_dataset(layout.root, transform=lambda group: group.line.group_id))) == GROUPS


def test_without_torch_only_the_dataset_is_missing(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.utils.data", None)
    with pytest.raises(ModuleNotFoundError):
        as_dataset(layout.root, transform=len)
