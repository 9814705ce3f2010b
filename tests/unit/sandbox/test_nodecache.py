"""What a node keeps unpacked: made once, kept while used, the least recently used leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox.errors import LayerError
from sandbox.nodecache import NodeCache

KIB = 1024


def content(size: int) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        directory.mkdir()
        (directory / "data").write_bytes(os.urandom(size))

    return make


def used(cache: NodeCache, name: str, at: int) -> None:
    """Let a directory's last use be then."""
    os.utime(cache.root / f"{name}.lock", (at, at))


def filled(root: Path, *names: str, quota: int | None = None) -> NodeCache:
    cache = NodeCache(root, quota)
    for number, name in enumerate(names):
        cache.hold(name, content(100 * KIB)).release()
        used(cache, name, 1000 + number)
    return cache


def test_many_that_want_one_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(directory: Path) -> None:
        made.append(directory)
        content(10)(directory)

    def hold(number: int) -> bytes:
        with NodeCache(tmp_path / "cache").hold("a", make) as held:
            return (held.path / "data").read_bytes()

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(hold, range(32)))
    assert len(made) == 1 and len(found) == 1


def test_the_least_recently_used_leave_first(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache", "a", "b", "c")
    used(cache, "a", 2000)
    said = cache.trim(250 * KIB, dry_run=True)
    assert said.names == ["b"] and cache.names() == ["a", "b", "c"]
    assert cache.trim(250 * KIB) == said and cache.names() == ["a", "c"]
    assert said.size_bytes >= 100 * KIB
    assert sorted(path.name for path in cache.root.iterdir()) == ["a", "a.lock", "c", "c.lock"]


def test_what_is_in_use_never_leaves(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache", "a", "b")
    held = cache.hold("a", content(1))
    used(cache, "a", 1)
    assert cache.trim(0).names == ["b"] and (held.path / "data").exists()
    held.release()
    held.release()
    assert cache.trim(0).names == ["a"] and cache.names() == []


def test_a_new_one_makes_room_for_itself(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache", "a", "b", quota=250 * KIB)
    cache.hold("c", content(100 * KIB), needs=100 * KIB).release()
    assert cache.names() == ["b", "c"]
    cache.hold("d", content(100 * KIB)).release()  # nobody knew its size before
    assert "d" in cache.names() and len(cache.names()) == 2


def test_one_that_is_wanted_again_while_it_leaves_is_made_again(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache")
    stop = threading.Event()

    def trim() -> None:
        while not stop.is_set():
            cache.trim(0)

    with ThreadPoolExecutor(1) as pool:
        trimming = pool.submit(trim)
        try:
            for _ in range(100):
                with cache.hold("a", content(10)) as held:
                    assert len((held.path / "data").read_bytes()) == 10
        finally:
            stop.set()
        trimming.result()


def test_what_the_dead_left_half_made_goes(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache", "a")
    for left in (".making-b/x", ".gone-c-123/y"):
        (cache.root / left).mkdir(parents=True)

    def dies(directory: Path) -> None:
        directory.mkdir()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.hold("b", dies)
    cache.trim(10**9)
    assert {path.name for path in cache.root.iterdir() if path.suffix != ".lock"} == {"a"}


def test_a_disk_without_room_is_said(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match=r"bytes left and a needs 1000000000000000000: free some"):
        NodeCache(tmp_path / "cache").hold("a", content(1), needs=10**18)
