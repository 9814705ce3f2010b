"""`action=plan` for Slurm placements: the jobs, what is wrong with them, the scripts, and why there is no estimate."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml

from launch.cli import main
from launch.slurm import executor, planning
from launch.slurm.checks import check
from launch.slurm.client.errors import SlurmUnavailable
from launch.slurm.client.protocol import SiteInfo
from launch.slurm.estimate import Estimate, Start
from launch.slurm.planning import candidates, make_plan, words
from launch.slurm.shapes import SlurmPlacement, jobs_of
from tests.unit.launch.slurm.configs import POOLS, make
from tests.unit.launch.slurm.sites import Nodes, site


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_site(config: object) -> tuple[None, str]:
        return None, "sinfo is not on PATH"

    monkeypatch.setattr(planning, "_site", no_site)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> SiteInfo:
    there = site()

    def start(config: object, placement: SlurmPlacement) -> Estimate:
        late = {"het": 5400, "linked": 0}.get(placement)
        problem = "" if late is not None else "allocation failure: no"
        return Estimate(placement=placement, starts=(Start(job="x", in_s=late, nodes="cpu1", problem=problem),))

    monkeypatch.setattr(planning, "_site", lambda config: (there, ""))
    monkeypatch.setattr(planning, "estimate", start)
    return there


def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, *overrides: str) -> dict[str, dict[str, object]]:
    code = main(["action=plan", f"run_dir={tmp_path}/one", *overrides])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert list(tmp_path.iterdir()) == []
    document: dict[str, dict[str, object]] = yaml.safe_load(out)
    return document


def test_without_slurm_the_scripts_are_shown_and_why_there_is_no_estimate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, unreachable: None
) -> None:
    document = planned(capsys, tmp_path, "placement=het", *POOLS)
    slurm = document["plan"]["slurm"]
    assert isinstance(slurm, dict)
    assert slurm["no_estimate"] == "sinfo is not on PATH" and "estimated_start" not in slurm
    config = make("placement=het", *POOLS, run_dir=f"{tmp_path}/one")
    (job,) = jobs_of(config, "het")
    text = executor.text(job, config, run_id="RUN_ID", name="rollmill-RUN_ID-het-0000")
    assert document["scripts"] == {"het": {"het": text}}
    assert [one["component"] for one in slurm["jobs"]["het"]] == ["control", "init", "run", "eval", "fleet"]
    assert slurm["jobs"]["het"][2]["mem_mib_a_node"] == 2048


def test_processes_are_counted_over_all_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, unreachable: None
) -> None:
    plan = planned(capsys, tmp_path, "placement=linked", *POOLS)["plan"]
    assert plan["processes"] == {
        "router": {"count": 1}, "replica": {"count": 3}, "init": {"count": 2, "slots": 4},
        "run": {"count": 4, "slots": 32}, "eval": {"count": 1, "slots": 8},
    }  # fmt: skip
    assert plan["processes_total"] == 11


def test_every_placement_gets_its_estimate_and_the_findings_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, reachable: SiteInfo
) -> None:
    document = planned(capsys, tmp_path, "placement=auto", "pools.run.cpus_per_task=9")
    slurm = document["plan"]["slurm"]
    assert isinstance(slurm, dict)
    assert slurm["first_tried"] == "het"
    assert slurm["estimated_start"]["het"]["starts"] == "in 1 h 30 min"
    assert slurm["estimated_start"]["linked"]["starts"] == "now"
    assert slurm["estimated_start"]["colocated"] == {"starts": "never as asked", "reason": "allocation failure: no"}
    assert [message for message in slurm["refused"] if "pools.run asks for 9 CPUs" in message]
    assert set(document["scripts"]) == {"het", "linked"}


def test_a_local_plan_asks_no_slurm(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(config: object) -> None:
        raise AssertionError("Slurm was asked")

    monkeypatch.setattr(planning, "make_plan", never)
    document = planned(capsys, tmp_path, "placement=local")
    assert "scripts" not in document and "slurm" not in document["plan"]


def test_auto_takes_linked_jobs_at_once_where_the_run_is_large() -> None:
    assert candidates(make("placement=auto")) == ("het", "linked")
    assert candidates(make("placement=auto", "pools.run.nodes=61")) == ("linked",)
    assert candidates(make("placement=auto", "cluster.het_max_pending_s=0")) == ("linked",)
    assert candidates(make("placement=colocated")) == ("colocated",)


def test_a_site_that_does_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def site(self) -> SiteInfo:
            raise SlurmUnavailable("sinfo did not answer within 20 s")

    monkeypatch.setattr(planning, "open_client", lambda clusters: Silent())
    plan = make_plan(make("placement=linked"))
    assert plan.no_estimate == "sinfo did not answer within 20 s" and plan.estimates == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (40, "40 s"),
        (720, "12 min"),
        (750, "12 min"),
        (11_100, "3 h 5 min"),
        (187_300, "2 d 4 h"),
        (86_400, "1 d"),
    ],
)
def test_durations_in_words(seconds: int, said: str) -> None:
    assert words(seconds) == said


EXAMPLES: dict[str, tuple[SlurmPlacement, SiteInfo]] = {
    "example-two-partitions": (
        "het",
        site(Nodes("c", 5, 64, 256_000, ("cpu",)), Nodes("g", 2, 64, 512_000, ("gpu",), gpus=4)),
    ),
    "example-fat-node": ("colocated", site(Nodes("dgx", 1, 224, 2_000_000, ("dgx",), gpus=8))),
    "example-preemptible": (
        "linked",
        site(Nodes("c", 4, 64, 512_000, ("cpu", "preempt")), Nodes("g", 2, 64, 512_000, ("preempt",), gpus=4)),
    ),
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_worked_examples_compose_render_and_fit_the_site_that_they_are_for(name: str) -> None:
    placement, there = EXAMPLES[name]
    config = make(f"cluster={name}", f"placement={placement}", "fleet.gpus_per_replica=1")
    assert config.cluster.name == name
    jobs = jobs_of(config, placement)
    assert check(config, jobs, there) == []
    for job in jobs:
        text = executor.text(job, config, run_id="rm-1", name="n")
        assert "#SBATCH --account=my-project\n" in text
        assert all(line in text for line in config.cluster.setup)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_documents_examples_are_these_files(name: str) -> None:
    root = Path(__file__).parents[4]
    body = (root / "conf" / "cluster" / f"{name}.yaml").read_text()
    assert textwrap.dedent(body) in (root / "docs" / "clusters.md").read_text()
