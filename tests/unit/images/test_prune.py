"""What leaves a store and what stays; and turns at unpacking."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from sandbox.errors import ImageError
from sandbox.layers import pack
from sandbox.mountplan import MAX_LAYERS
from sandbox.nodecache import NodeCache
from stages.errors import ShardError
from stages.images import ImageStore
from stages.layout import RunLayout, StoreLayout
from stages.pacing import turn
from stages.pruning import GRACE_S, LEFTOVER_S, Wish, prune, register
from stages.store import LayerStore
from tests.unit.images.archives import BASH, tar

DAY = 86400.0
NOW = 10_000 * DAY


class Store:
    """A store whose files say when they were used last."""

    def __init__(self, home: Path) -> None:
        self.home, self.layout = home, StoreLayout(home / "store")
        self.layers = LayerStore(self.layout, home / "node")
        self.layers.prepare(home / "run")
        (self.layout.users / next(iter(os.listdir(self.layout.users)))).unlink()
        self.images = ImageStore(self.layout)

    def layer(self, key: str, days: float) -> str:
        source = self.home / f"source-{key}"
        source.mkdir()
        (source / key).write_text(key * 1000)
        digest = self.layers.publish(key, pack({b"": source}, self.home / f"{key}.tar.zst"))
        self.used(self.layout.layer_blob(digest[7:]), days)
        return digest

    def image(self, name: str, days: float) -> str:
        archive = self.home / "image.tar"
        archive.write_bytes(tar([*BASH, (name, "file", b"x")]))
        digest = self.images.add(name, archive).name.digest
        self.used(self.layout.image_blob(digest[7:]), days)
        return digest

    def used(self, path: Path, days: float) -> None:
        os.utime(path, (NOW - days * DAY, NOW - days * DAY))

    def run(self, name: str, days: float, sign_days: float, state: str = "") -> None:
        """A run that began so long ago and was last seen so long ago."""
        run = RunLayout(self.home / name)
        run.report.mkdir(parents=True)
        run.router_json.write_text("{}")
        self.used(run.router_json, sign_days)
        if state:
            run.summary.write_text(json.dumps({"state": state}))
        register(self.layout, run.root)
        for file in self.layout.users.iterdir():
            use = json.loads(file.read_text())
            if use["run_dir"] == str(run.root):
                file.write_text(json.dumps({**use, "since": NOW - days * DAY}))

    def prune(
        self, *names: str, days: float | None = None, quota: int | None = None, dry_run: bool = False
    ) -> set[str]:
        wish = Wish(names, None if days is None else days * DAY, quota)
        return {one.name for one in prune(self.layout, wish, dry_run=dry_run, now=NOW)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_what_nothing_names_goes_and_the_rest_stays(store: Store) -> None:
    named, lost = store.layer("a", 3), store.layer("b", 3)
    kept, gone = store.image("kept", 3), store.image("gone", 3)
    store.layout.layer_key("b").unlink()
    store.layout.image_name("gone").unlink()
    assert store.prune(dry_run=True) == {lost, gone}
    assert store.layout.layer_blob(lost[7:]).exists() and store.layout.image_blob(gone[7:]).exists()
    assert store.prune() == {lost, gone} and store.prune() == set()
    assert store.layers.find("a") == named and store.images.check("kept") == kept
    assert not store.layout.image_config(gone[7:]).exists()


def test_what_was_just_written_is_not_lost_before_it_is_named(store: Store) -> None:
    lost = store.layer("a", (GRACE_S - 60) / DAY)
    store.layout.layer_key("a").unlink()
    assert store.prune() == set()
    store.used(store.layout.layer_blob(lost[7:]), (GRACE_S + 60) / DAY)
    assert store.prune() == {lost}


def test_a_run_that_has_just_begun_and_written_nothing_holds_what_it_uses(store: Store) -> None:
    lost = store.layer("a", 3)
    store.layout.layer_key("a").unlink()
    store.run("begun", 5, 0)
    RunLayout(store.home / "begun").router_json.unlink()
    assert store.prune() == set()
    store.run("long ago", 20, 0)
    for name in ("begun", "long ago"):
        RunLayout(store.home / name).router_json.unlink(missing_ok=True)
    for file in store.layout.users.iterdir():
        use = json.loads(file.read_text())
        file.write_text(json.dumps({**use, "since": NOW - 20 * DAY}))
    assert store.prune() == {lost}


def test_layers_go_by_age_and_by_quota_the_least_used_first(store: Store) -> None:
    old, middle, new = store.layer("a", 30), store.layer("b", 20), store.layer("c", 1)
    image = store.image("kept", 40)
    sizes = [store.layout.layer_blob(digest[7:]).stat().st_size for digest in (old, middle, new)]
    whole = sum(sizes) + store.layout.image_blob(image[7:]).stat().st_size
    assert store.prune(days=25, dry_run=True) == {old}
    assert store.prune(quota=whole - 1, dry_run=True) == {old}
    assert store.prune(quota=whole - sizes[0] - 1) == {old, middle}
    assert store.layers.find("a") is None and store.layers.find("c") == new
    again = store.layers.publish("a", pack({b"": store.home / "source-a"}, store.home / "again.tar.zst"))
    assert again == old == store.layers.find("a")


def test_nothing_that_a_run_may_use_goes(store: Store) -> None:
    before, since = store.layer("a", 12), store.layer("b", 5)
    store.run("run", days=10, sign_days=0.1)
    assert store.prune(quota=0, dry_run=True) == {before}
    (store.home / "run/report/summary.json").write_text(json.dumps({"state": "completed"}))
    assert store.prune(quota=0, dry_run=True) == {before, since}


@pytest.mark.parametrize(
    ("sign_days", "state", "free"), [(13, "", False), (15, "", True), (1, "failed", True), (1, "requeued", False)]
)
def test_a_run_that_ended_or_was_abandoned_holds_nothing(store: Store, sign_days: int, state: str, free: bool) -> None:
    digest = store.layer("a", 5)
    store.run("run", 20, sign_days, state)
    assert store.prune(quota=0, dry_run=True) == ({digest} if free else set())


def test_an_image_goes_when_asked_but_not_under_a_run(store: Store) -> None:
    digest = store.image("x", 5)
    store.run("run", days=10, sign_days=0.1)
    with pytest.raises(ImageError, match=r"x may be in use by .*/run: prune it when the run has ended"):
        store.prune("x")
    assert store.images.digest("x") == digest
    (store.home / "run/report/summary.json").write_text(json.dumps({"state": "cancelled"}))
    assert store.prune("x") == {"x", digest}
    with pytest.raises(ImageError, match="no image 'x'"):
        store.prune("x")


def test_files_of_writers_that_died_go_after_a_day(store: Store) -> None:
    left = store.layout.layer_blobs / ".x.tar.zst.node.1.0.abcd.tmp"
    left.write_text("half")
    store.used(left, 0.5)
    assert store.prune() == set()
    store.used(left, LEFTOVER_S / DAY + 0.1)
    assert store.prune() == {left.name} and not left.exists()


def test_using_a_layer_or_an_image_is_seen(store: Store) -> None:
    layer, image = store.layer("a", 30), store.image("x", 30)
    with ExitStack() as holds:
        store.layers.take(layer, holds)
        store.layers.images.take("x", holds)
    assert store.prune(days=25, dry_run=True) == set()
    store.used(store.layout.image_blob(image[7:]), 30)
    ImageStore(store.layout).digest("x")
    assert store.layout.image_blob(image[7:]).stat().st_mtime > NOW - 30 * DAY


def test_a_long_chain_stands_on_few_directories(store: Store) -> None:
    digests = [store.layer(f"key{number}", 1) for number in range(MAX_LAYERS + 3)]

    async def names(room: int) -> tuple[int, set[str]]:
        async with store.layers.standing("host", digests, room=room) as ground:
            return len(ground.layers), {path.name for layer in ground.layers for path in layer.iterdir()}

    for room in (0, 1):
        assert asyncio.run(names(room)) == (MAX_LAYERS - room, {f"key{number}" for number in range(MAX_LAYERS + 3)})
    assert set(store.layers.warm) == set(digests)


def test_those_who_stand_on_the_same_layers_hold_them_once_until_the_last_has_gone(store: Store) -> None:
    digest = store.layer("a", 1)
    looked: list[str] = []
    take = store.layers.take

    def counted(name: str, holds: ExitStack) -> Path:
        looked.append(name)
        return take(name, holds)

    store.layers.take = counted  # type: ignore[method-assign]

    async def scenario() -> None:
        first, second, node = AsyncExitStack(), AsyncExitStack(), NodeCache(store.home / "node")
        ground = await first.enter_async_context(store.layers.standing("host", [digest]))
        assert await second.enter_async_context(store.layers.standing("host", [digest])) is ground
        await first.aclose()
        assert node.trim(0).names == [] and ground.layers[0].is_dir(), "one stands on it still"
        await second.aclose()
        await asyncio.sleep(0)
        assert node.trim(0).names != [] and not ground.layers[0].exists()
        for _ in range(2):  # a failure is not shared with those who come later
            with pytest.raises(ShardError):
                await AsyncExitStack().enter_async_context(store.layers.standing("host", ["sha256:" + "0" * 64]))

    asyncio.run(scenario())
    assert looked == [digest] + ["sha256:" + "0" * 64] * 2


def test_few_unpack_at_once_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)

    with turn(tmp_path / "turns", 2, 60) as one, turn(tmp_path / "turns", 2, 60) as other:
        assert one and other
        with turn(tmp_path / "turns", 2, 3, clock=lambda: sum(waited), sleep=sleep) as third:
            assert not third and 3 <= sum(waited) < 4
    with turn(tmp_path / "turns", 2, 60, sleep=sleep) as again:
        assert again
    with turn(Path("/proc/no-such-place"), 2, 60, sleep=sleep) as nowhere:
        assert not nowhere
