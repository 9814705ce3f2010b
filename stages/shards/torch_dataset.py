"""A run as a torch IterableDataset: whole groups, each to one rank and one data loader worker; torch is optional."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stages.shards.reader import ShardReader
from stages.shards.rows import ShardGroup


def as_dataset(
    run_dir: str | Path,
    *,
    transform: Callable[[ShardGroup], Any],
    after: int = 0,
    follow: bool = False,
    tag: str | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Any:
    """A torch.utils.data.IterableDataset of `transform(group)` for each closed group with a usable rollout.

    It can be pickled, so a loader's workers may be forked or spawned; each makes it anew from these arguments.

    Args:
        run_dir: the run directory.
        transform: makes the example, where the data is read: in the loader's workers. It must be picklable for them.
        after: as ShardReader's.
        follow: as ShardReader's.
        tag: as ShardReader's.
        rank: of this training process.
        world_size: training processes.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    data = importlib.import_module("torch.utils.data")

    def examples(_: Any) -> Iterator[Any]:
        worker = data.get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        with ShardReader(
            run_dir, after, follow, tag, rank=rank * workers + number, world_size=world_size * workers
        ) as reader:
            for group in reader.groups():
                if any(not row.line.mask_sample for row in group.rows):
                    yield transform(group)

    anew = functools.partial(
        as_dataset, run_dir, transform=transform, after=after, follow=follow, tag=tag, rank=rank, world_size=world_size
    )
    # The class is made where torch is found, so pickle cannot look it up by name.
    methods = {"__iter__": examples, "__reduce__": lambda _: (anew, ())}
    return type("ShardDataset", (data.IterableDataset,), methods)()
