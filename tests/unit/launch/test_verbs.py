"""The verbs on a run directory that the stages' own writers made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest

from conf.load import digest, dump_config
from conf.schema import Config, SharedFilesystem
from launch.cli import main
from launch.errors import CommandError
from launch.rundirs import find_run_dir
from launch.slurm.cancelling import NotCancelledError
from launch.verbs.journal import event_line
from launch.verbs.logs import follow, last_lines, log_files
from launch.verbs.status import status_text
from stages import control, manifest, sharedfs
from stages.journal.codec import encode_line
from stages.layout import RunLayout
from stages.ledger import events
from stages.ledger.events import EpochBegan, GroupSpec, Rules, Submitted
from tests.unit.stages_files.samples import make_row, publish, rows_line, write_rows


def new_run(root: Path) -> RunLayout:
    config = replace(Config(), run_dir=str(root), fs=SharedFilesystem(visibility_s=0.05))
    layout = RunLayout(root)
    manifest.open_run(layout, dump_config(config), digest(config), "test")
    return layout


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A run of four rollouts, the last of which was cancelled in the queue, with its journal."""
    layout = new_run(tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    rows = [make_row(number, tag="night" if number == 2 else "") for number in range(4)]
    places = [*write_rows(layout, rows[:3]), None]
    publish(layout, [rows_line(seq, row, place) for seq, (row, place) in enumerate(zip(rows, places, strict=True), 1)])
    run_id = manifest.read(layout).run_id  # type: ignore[union-attr]
    journal = sharedfs.AppendFile(layout.journal_part(1, 0))
    for event in (
        EpochBegan(t=10.0, epoch=1, run_id=run_id, history=[], rules=Rules()),
        Submitted(t=11.5, groups=[GroupSpec("g0", "t0", "ab" * 32, "cd" * 32)], n=4),
    ):
        journal.append(encode_line(events.encode(event)))
    journal.sync()
    journal.close()
    return layout


def call(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 0
    return capsys.readouterr().out


def test_the_newest_run_is_taken_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in ((30, "old"), (10, "sweep/1"), (20, "middle")):
        layout = new_run(tmp_path / "runs" / name)
        os.utime(layout.manifest, (1_000_000 - age, 1_000_000 - age))
    assert find_run_dir(None, tmp_path) == tmp_path / "runs" / "sweep" / "1"
    assert capsys.readouterr().err == f"rollmill: the newest run here is {tmp_path}/runs/sweep/1\n"
    assert find_run_dir("runs/old", tmp_path) == tmp_path / "runs" / "old"
    with pytest.raises(CommandError, match=r"has no manifest\.json"):
        find_run_dir("runs", tmp_path)
    with pytest.raises(CommandError, match="there is no run under"):
        find_run_dir(None, tmp_path / "runs")


def test_status_of_a_run_that_nobody_serves(finished: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    status = json.loads(call(capsys, "status", str(finished.root), "--json"))
    assert set(status) >= {"run_id", "state", "stages", "rollouts", "groups", "fleet", "members", "slurm", "stuck"}
    assert status["rollouts"]["accepted"] == 4
    assert "rollouts 0 of 4 ended" in call(capsys, "status")


def test_status_text_says_all_that_matters() -> None:
    text = status_text(
        {
            "run_id": "r1",
            "state": "running",
            "stages": {"init": {"queued": 1, "leased": 2}, "run": {"queued": 3, "leased": 4}, "eval": {}},
            "rollouts": {"accepted": 20, "completed": 8, "failed": 1, "cancelled": 1, "open": 10},
            "reward": {"mean": 0.875, "n": 8},
            "fleet": [{"id": "a", "url": "http://h:1", "state": "down", "sessions": 0, "reason": "no answer"}],
            "members": [{"kind": "run"}, {"kind": "run"}, {"kind": "router"}],
            "stuck": "nothing leased for 600 s",
        }
    )
    assert text.splitlines() == [
        "run      r1: running",
        "rollouts 10 of 20 ended: 8 completed, 1 failed, 1 cancelled",
        "init     1 queued, 2 leased",
        "run      3 queued, 4 leased",
        "eval     0 queued, 0 leased",
        "reward   0.8750 mean",
        "replica  a down at http://h:1, 0 sessions (no answer)",
        "members  1 router, 2 run",
        "stuck    nothing leased for 600 s",
    ]


def test_journal_in_three_shapes(finished: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    lines = call(capsys, "journal", str(finished.root), "--json").splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["epoch", "submit"]
    stats = json.loads(call(capsys, "journal", "--stats"))
    assert stats == {"events": 2, "types": {"epoch": 1, "submit": 1}}
    shown = call(capsys, "journal").splitlines()
    assert shown[0].startswith("00:00:10.000 epoch")
    assert shown[1].startswith("00:00:11.500 submit")


def test_a_long_value_in_the_journal_is_cut() -> None:
    assert event_line({"t": 0.0, "type": "x", "key": "k" * 500}).endswith("k...")
    assert len(event_line({"t": 0.0, "type": "x", "key": "k" * 500})) < 160


@pytest.mark.parametrize("verb", ["drain", "cancel"])
def test_requests_are_left_for_the_run(finished: RunLayout, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert call(capsys, verb, str(finished.root)).startswith(f"{finished.root}: asked to {verb}")
    assert control.pending(finished, "drain") == (verb == "drain")
    assert control.pending(finished, "cancel") == (verb == "cancel")


def test_export_writes_what_is_committed(
    finished: RunLayout, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = call(capsys, "export", "--format", "jsonl", "-o", str(tmp_path / "rows.jsonl"), str(finished.root))
    assert said.startswith(f"{tmp_path}/rows.jsonl: 3 rollouts, 3 chains")
    assert "1 ended without a row" in said
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == ["r0", "r1", "r2"]
    call(capsys, "export", "--format=parquet", "-o", str(tmp_path / "rows.parquet"), "--tag", "night")
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").column("rollout_id").to_pylist() == ["r2"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--format", "csv", "-o", "x"], "no export format 'csv': choose one of jsonl, parquet"),
        (["--format", "jsonl", "-o", "nowhere/x"], "give a file name in a directory that exists"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(
    finished: RunLayout, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert main(["export", str(finished.root), *args]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_shards_are_read_and_counted(finished: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(call(capsys, "shards", str(finished.root))) == {
        "rollouts": 4,
        "chains": 3,
        "tokens": 18,
        "sampled_tokens": 12,
        "status": {"completed": 4},
        "reward_mean": 1.0,
        "files": 1,
    }
    heads = [json.loads(line) for line in call(capsys, "shards", "--head", "2").splitlines()]
    assert [row["rollout_id"] for row in heads] == ["r0", "r1"]
    assert json.loads(call(capsys, "shards", "--after", "3"))["rollouts"] == 1
    assert main(["shards", "--head", "-1"]) == 2
    before = call(capsys, "shards", "--head", "4")
    assert "3 rollouts in 1 Parquet files" in call(capsys, "shards", "compact", str(finished.root))
    assert not list(finished.shards.glob("*.arrows"))
    assert call(capsys, "shards", "--head", "4") == before


def test_a_damaged_shard_is_an_error_that_names_the_file(
    finished: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = finished.shards.glob("*.arrows")
    data = bytearray(shard.read_bytes())
    data[-20] ^= 0xFF
    shard.write_bytes(data)
    assert main(["shards", str(finished.root)]) == 1
    assert shard.name in capsys.readouterr().err


@pytest.fixture
def logged(finished: RunLayout) -> RunLayout:
    for attempt, text in ((1, "first\n"), (2, "".join(f"line {n}\n" for n in range(40)))):
        place = finished.attempt_logs(attempt)
        place.mkdir(parents=True, exist_ok=True)
        (place / "router.log").write_text(text)
        (place / "run-1-ab.log").write_text("hello\n")
    return finished


def test_logs_show_paths_and_tails(logged: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    last = logged.attempt_logs(2)
    out = call(capsys, "logs", "--lines", "2").splitlines()
    assert out == [f"==> {last}/router.log <==", "line 38", "line 39", f"==> {last}/run-1-ab.log <==", "hello"]
    out = call(capsys, "logs", str(logged.root), "--attempt", "1", "--stage", "router").splitlines()
    assert out == [f"==> {logged.attempt_logs(1)}/router.log <==", "first"]
    assert main(["logs", "--stage", "init"]) == 2
    assert "logs there are of router, run" in capsys.readouterr().err
    assert main(["logs", "--attempt", "7"]) == 2
    assert "--attempt got 7; allowed: 1, 2" in capsys.readouterr().err


def test_the_tail_of_a_large_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "big.log"
    log.write_bytes(b"x" * 2_000_000 + b"\nlast\xff\n")
    assert last_lines(log, 1) == ["last�"]
    assert last_lines(log, 0) == []


def test_following_gives_whole_new_lines_and_new_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text("old\n")

    steps: Iterator[None] = _writes(first, second)
    seen = follow(lambda: sorted(tmp_path.glob("*.log")), wait=lambda _: next(steps))
    assert [next(seen) for _ in range(3)] == [(first, "half done"), (second, "b1"), (second, "b2")]


def _writes(first: Path, second: Path) -> Iterator[None]:
    with first.open("a") as one:
        one.write("half")
        one.flush()
        yield
        one.write(" done\n")
    second.write_text("b1\nb2\n")
    yield


def test_following_goes_on_with_the_next_attempt(tmp_path: Path) -> None:
    old, other, new = (tmp_path / "logs" / name for name in ("attempt_1/run-1.log", "attempt_2/router.log",
                                                             "attempt_2/run-1.log"))  # fmt: skip

    def writes() -> Iterator[None]:
        other.parent.mkdir()
        other.write_text("no RUN worker yet\n")
        with old.open("a") as last:
            last.write("the last of it\n")
        yield
        new.write_text("goes on\n")
        yield

    old.parent.mkdir(parents=True)
    old.write_text("old\n")
    steps = writes()
    seen = follow(lambda: log_files(tmp_path, None, "run"), wait=lambda _: next(steps))
    assert [next(seen), next(seen)] == [(old, "the last of it"), (new, "goes on")]


def test_a_cancellation_that_slurm_did_not_take_is_no_success(
    finished: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def not_taken(*_: object, **__: object) -> list[str]:
        raise NotCancelledError("Slurm did not take it: no answer")

    monkeypatch.setattr("launch.slurm.cancelling.cancel_jobs", not_taken)
    assert main(["cancel", str(finished.root)]) == 1
    assert "Slurm did not take it" in capsys.readouterr().err


def test_every_verb_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("status", "logs", "cancel", "drain", "export", "shards", "journal"):
        assert call(capsys, verb, "--help").startswith(f"usage: rollmill {verb}")
