"""What a run remembers of its submissions, and that a job knows the code that it was submitted with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from launch.slurm import record
from launch.slurm.code import code_digest
from launch.slurm.record import Submission
from stages import sharedfs
from stages.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path)
    made.slurm.mkdir()
    return made


def one(job_id: str, job: str = "het", at: float = 0.0) -> Submission:
    return Submission(
        name=f"n-{job_id}", job=job, job_id=job_id, placement="het", components=["control"], submitted_at=at
    )


def test_a_run_without_submissions(tmp_path: Path) -> None:
    assert record.read(RunLayout(tmp_path / "none")) == []


def test_submissions_are_read_in_their_order_and_the_newest_of_each_job_counts(layout: RunLayout) -> None:
    for job_id, job, at in (("9", "het", 5.0), ("8", "run+1", 3.0), ("10", "het", 7.0)):
        record.add(layout, one(job_id, job, at))
    (layout.slurm / "n-9.sh").write_text("no record")
    found = record.read(layout)
    assert [sub.job_id for sub in found] == ["8", "9", "10"]
    assert {sub.job_id for sub in record.current(found)} == {"8", "10"}


def test_what_is_forgotten_was_submitted_all_the_same(layout: RunLayout) -> None:
    record.add(layout, one("9", at=1000.0))
    record.add(layout, one("10", "control", at=1100.0))
    record.forget(layout, one("10", "control", at=1100.0))
    assert [sub.job_id for sub in record.read(layout)] == ["9"]
    everything = record.read(layout, forgotten=True)
    assert [sub.job_id for sub in everything] == ["9", "10"]
    assert record.in_last_hour(everything, now=1200.0) == 2
    assert record.in_last_hour(everything, now=1050.0 + 3600) == 1


def test_a_record_of_before_the_newest_fields_is_read(layout: RunLayout) -> None:
    older = {"name": "n", "job": "het", "job_id": "9", "placement": "het", "components": ["control"]}
    sharedfs.write_atomic(record.path(layout, "n"), msgspec.json.encode(older))
    (found,) = record.read(layout)
    assert (found.code, found.forgotten, found.control) == ("", False, False)


def test_the_codes_digest_is_of_paths_and_contents_of_what_runs(tmp_path: Path) -> None:
    for package in ("conf", "launch", "stages", "sandbox", "workflows"):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "deep" / "module.py").write_text("x = 1\n")
    (tmp_path / "conf" / "config.yaml").write_text("a: 1\n")
    before = code_digest(tmp_path)
    (tmp_path / "stages" / "__pycache__").mkdir()
    (tmp_path / "stages" / "__pycache__" / "module.pyc").write_bytes(b"compiled")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "module.py").write_text("y = 1\n")
    assert code_digest(tmp_path) == before and len(before) == 64
    seen = {before}
    for change in (
        lambda: (tmp_path / "sandbox" / "deep" / "module.py").write_text("x = 2\n"),
        lambda: (tmp_path / "conf" / "config.yaml").write_text("a: 2\n"),
        lambda: (tmp_path / "stages" / "deep" / "module.py").rename(tmp_path / "stages" / "module.py"),
        lambda: (tmp_path / "launch" / "new.py").touch(),
    ):
        change()
        seen.add(code_digest(tmp_path))
    assert len(seen) == 5


def test_this_installations_code_is_what_runs_here() -> None:
    assert code_digest() == code_digest(Path(__file__).resolve().parents[4])


def test_a_run_stays_on_the_cluster_that_took_its_first_job(tmp_path: Path) -> None:
    def one(job_id: str, *clusters: str) -> Submission:
        return Submission(name=job_id, job=job_id, job_id=job_id, placement="linked", components=[],
                          clusters=list(clusters))  # fmt: skip

    doubtful, east, other = one("1", "east", "west"), one("2", "east"), one("1", "west")
    assert record.home([], ["east", "west"]) == ["east", "west"]
    assert record.home([doubtful], ["east", "west"]) == ["east", "west"]
    assert record.home([doubtful, east, other], ["east", "west"]) == ["east"]
    assert record.by_clusters([east, other, one("3", "east")]) == {("east",): ["2", "3"], ("west",): ["1"]}


def test_a_record_that_another_has_made_stays(layout: RunLayout) -> None:
    theirs = msgspec.structs.replace(one("9"), reason="resume")
    assert record.add_new(layout, theirs) == theirs
    assert record.add_new(layout, one("9")) == theirs
    assert record.find(layout, "n-9") == theirs and record.find(layout, "n-8") is None
    assert [path.name for path in layout.slurm.iterdir()] == ["n-9.json"]


def test_inside_a_job_of_several_clusters_its_own_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "west")
    assert record.here(["east", "west"]) == ["west"]
    assert record.here([]) == [], "a site of one cluster is not asked by its name"
    assert record.here(["east"]) == ["east"]
