"""Bounds, what passes them, and how usage is read."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest

from sandbox import watchdog
from sandbox.errors import LimitExceeded
from sandbox.limits import Bounds, Usage, counts_by_namespace, excess, most_processes, resource_limits
from sandbox.usage import Process, families, written
from sandbox.watchdog import Watchdog
from tests.support.waiting import eventually

MIB = 1 << 20


def test_only_what_is_passed_is_an_excess() -> None:
    bounds = Bounds(memory_mib=2, processes=3)
    assert excess(bounds, Usage(memory_bytes=2 * MIB, processes=3, cpu_s=1e9, disk_bytes=1 << 60)) is None
    passed = excess(bounds, Usage(memory_bytes=3 * MIB))
    assert passed is not None and (passed.limit, passed.measured, passed.allowed) == ("memory_mib", 3.0, 2.0)
    assert excess(Bounds(disk_mib=1), Usage(disk_bytes=None)) is None
    assert not Bounds(open_files=5, file_mib=1).watched and Bounds(wall_s=1.0).watched


def test_resource_limits_follow_the_bounds() -> None:
    limits = resource_limits(Bounds(disk_mib=5, memory_mib=10, open_files=7))
    assert limits[resource.RLIMIT_FSIZE] == 5 * MIB and limits[resource.RLIMIT_DATA] == 20 * MIB
    assert limits[resource.RLIMIT_NOFILE] == 7 and resource.RLIMIT_CPU not in limits
    assert resource_limits(Bounds(disk_mib=5, file_mib=1))[resource.RLIMIT_FSIZE] == MIB
    assert resource_limits(Bounds()) == {resource.RLIMIT_CORE: 0}


def test_kernels_that_count_by_namespace() -> None:
    assert counts_by_namespace("5.14.0-427.el9.x86_64") and counts_by_namespace("6.1") and counts_by_namespace("10.0+")
    assert not counts_by_namespace("4.18.0-553.el8.x86_64") and not counts_by_namespace("5.13.19")


def test_the_kernel_holds_a_fork_bomb_where_the_watchdog_sees_that_it_passed_the_bound() -> None:
    assert most_processes(Bounds(processes=90), "6.1") == 102 and most_processes(Bounds(processes=800), "6.1") == 900
    assert most_processes(Bounds(processes=90), "4.18") is None and most_processes(Bounds(), "6.1") is None


def test_a_family_is_all_that_descends_from_its_root() -> None:
    table = {pid: Process(parent, 0.0, 1, 0) for pid, parent in ((2, 1), (3, 2), (4, 3), (5, 1), (6, 5))}
    found = families(table, [2, 5, 99])
    assert sorted(found[2]) == [2, 3, 4] and sorted(found[5]) == [5, 6] and found[99] == []


def test_what_was_written_is_counted_once_and_without_following(tmp_path: Path) -> None:
    place = tmp_path / "sandbox"
    (place / "upper/closed").mkdir(parents=True)
    (place / "layer1.tar.zst").write_bytes(b"x" * MIB)  # ours
    (place / "upper/file").write_bytes(b"x" * MIB)
    os.link(place / "upper/file", place / "upper/again")
    (place / "upper/out").symlink_to("/usr")
    with open(place / "upper/sparse", "wb") as file:
        file.truncate(1 << 40)
    (place / "upper/closed/inner").write_bytes(b"x" * MIB)
    (place / "upper/closed").chmod(0)
    size, names = written(place, 1 << 60, 1 << 60)
    assert 2 * MIB <= size < 3 * MIB and names == 7
    assert (place / "upper/closed").stat().st_mode & 0o777 == 0
    assert written(place, 1 << 60, 3)[1] == 4


class Looked:
    """A sandbox for a watchdog, whose processes are made up."""

    def __init__(self, directory: Path, bounds: Bounds) -> None:
        self.directory, self.bounds, self.roots = directory, bounds, {7}
        self.given = (0, 0)
        self.ended: list[str] = []

    def end(self, reason: LimitExceeded) -> None:
        self.ended.append(reason.limit)


def test_a_look_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def processes() -> dict[int, Process]:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise OSError(24, "Too many open files")
        return {7: Process(1, 0.0, 9, 0)}

    async def scenario() -> None:
        one = Looked(tmp_path, Bounds(processes=5))
        dog = Watchdog(tmp_path, lambda: [one], pace_s=0.001)
        dog.ensure()
        await eventually(lambda: one.ended, "ended")
        await dog.close()
        assert one.ended[0] == "processes"

    monkeypatch.setattr(watchdog, "processes", processes)
    asyncio.run(scenario())


def test_what_was_there_before_is_no_use_of_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "processes", lambda: {7: Process(1, 0.0, 1, 0)})
    (tmp_path / "merged").mkdir()
    for number in range(9):
        (tmp_path / f"merged/{number}").write_text("")
    one, other = Looked(tmp_path, Bounds(files=5)), Looked(tmp_path, Bounds(files=5))
    one.given, other.given = written(tmp_path, 1 << 60, 1 << 60), (0, 0)

    async def scenario() -> None:
        dog = Watchdog(tmp_path, lambda: [one, other], pace_s=0.001)
        dog._thread = watchdog.ThreadPoolExecutor(1)
        await dog._look_once()
        await dog.close()

    asyncio.run(scenario())
    assert one.ended == [] and other.ended == ["files"]


def test_the_time_of_a_shell_that_has_ended_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shells of six seconds each, and a look between them at which there is none."""
    monkeypatch.setattr(watchdog, "processes", lambda: {pid: Process(1, 6.0, 1, 0) for pid in (7, 8)})

    async def scenario() -> None:
        one, other = Looked(tmp_path, Bounds(cpu_s=10.0)), Looked(tmp_path, Bounds(cpu_s=5.0))
        other.roots = set()
        dog = Watchdog(tmp_path, lambda: [one, other], pace_s=0.001)
        look = dog._look_once
        dog._thread = watchdog.ThreadPoolExecutor(1)
        for roots in ({7}, set(), {8}):
            assert one.ended == []
            one.roots = roots
            await look()
        assert one.ended == ["cpu_s"] and other.ended == []
        await dog.close()

    asyncio.run(scenario())


def test_who_began_after_a_look_is_looked_into_when_the_disk_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "processes", lambda: {7: Process(1, 0.0, 1, 0)})
    used, into = [watchdog.Used(0, 100, 0)], list[Path]()

    def look_into(directory: Path, *_: int) -> tuple[int, int]:
        into.append(directory)
        return 0, 0

    monkeypatch.setattr(Watchdog, "_used", lambda _: used[0])
    monkeypatch.setattr(watchdog, "written", look_into)
    there = [Looked(tmp_path / "first", Bounds(files=40)), Looked(tmp_path / "waits", Bounds(files=40))]
    there[1].roots = set()

    async def looked() -> set[str]:
        into.clear()
        await dog._look_once()
        return {directory.name for directory in into}

    async def scenario() -> None:
        dog._thread = watchdog.ThreadPoolExecutor(1)
        assert await looked() == {"first"}
        there.append(Looked(tmp_path / "later", Bounds(files=40)))
        there[1].roots = {7}
        assert await looked() == {"waits"}  # it may have written before the last look
        used[0] = watchdog.Used(0, 109, 0)
        assert await looked() == set()
        used[0] = watchdog.Used(0, 110, 0)
        assert await looked() == {"later"}
        await dog.close()

    dog = Watchdog(tmp_path, lambda: there, pace_s=0.001)
    asyncio.run(scenario())
