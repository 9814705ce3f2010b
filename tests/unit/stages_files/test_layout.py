"""Every path of a run directory, and names that lead nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.errors import ManifestError, ShardError
from stages.layout import RunLayout, StoreLayout, parse_numbered, parse_part

LAYOUT = RunLayout(Path("/run"))


def test_every_path_of_the_contract() -> None:
    paths = {
        LAYOUT.manifest: "manifest.json",
        LAYOUT.config: "config.yaml",
        LAYOUT.router_json: "router.json",
        LAYOUT.member("eval-1-3f9a"): "members/eval-1-3f9a.json",
        LAYOUT.control_request("drain"): "control/drain.json",
        LAYOUT.journal_part(1, 0): "journal/000001-000000",
        LAYOUT.payloads_part(1, 2): "journal/payloads/000001-000002",
        LAYOUT.segment("run-0-aa", 3): "handoff/run-0-aa-3.seg",
        LAYOUT.shard("eval-1-3f9a", 10): "shards/eval-1-3f9a-10.arrows",
        LAYOUT.schema(): "shards/schema-v1.arrow",
        LAYOUT.index_part(12, 345): "index/000012-000345.jsonl",
        LAYOUT.failures: "failures.jsonl",
        LAYOUT.attempt_logs(2): "logs/attempt_2",
        LAYOUT.trainer_token: "secrets/trainer.token",
        LAYOUT.worker_token: "secrets/worker.token",
        LAYOUT.callback_key: "secrets/callback.key",
        LAYOUT.summary: "report/summary.json",
    }
    for path, relative in paths.items():
        assert LAYOUT.relative(path) == relative
        assert LAYOUT.resolve(relative) == path
        assert path.parent in LAYOUT.directories or path.parent.parent in LAYOUT.directories


def test_store_paths() -> None:
    store = StoreLayout(Path("/store"))
    assert store.layer_key("k1") == Path("/store/layers/keys/k1.json")
    assert store.layer_blob("ab12") == Path("/store/layers/blobs/ab12.tar.zst")


def test_numbers_are_read_back_as_numbers() -> None:
    assert parse_part(LAYOUT.journal_part(3, 4).name) == (3, 4)
    assert parse_part(LAYOUT.index_part(1_000_000, 7).name, ".jsonl") == (1_000_000, 7)
    assert parse_numbered(LAYOUT.shard("eval-1-3f9a", 10).name, ".arrows") == ("eval-1-3f9a", 10)
    assert parse_numbered(LAYOUT.segment("run-1", 0).name, ".seg") == ("run-1", 0)
    names = [LAYOUT.index_part(1_000_000, 0).name, LAYOUT.index_part(999_999, 0).name]
    assert sorted(names) == names  # as text the order is wrong, which is why numbers are compared
    assert sorted(names, key=lambda name: parse_part(name, ".jsonl") or (0, 0)) == names[::-1]


@pytest.mark.parametrize("name", ["payloads", "000001.claim", "000001-000000.jsonl.tmp", ".000001-000000.x.tmp", "1-2"])
def test_other_names_are_not_parts(name: str) -> None:
    assert parse_part(name) is None
    assert parse_part(name, ".jsonl") is None


@pytest.mark.parametrize("member", ["", "a/b", "../x", ".hidden", "a b", "x" * 200])
def test_a_member_id_that_is_no_file_name_is_refused(member: str) -> None:
    with pytest.raises(ManifestError, match="member id"):
        LAYOUT.shard(member, 0)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../secrets/worker.token", "shards/../../x"])
def test_a_record_cannot_name_a_file_outside_the_run(name: str) -> None:
    with pytest.raises(ShardError, match="not inside"):
        LAYOUT.resolve(name)
