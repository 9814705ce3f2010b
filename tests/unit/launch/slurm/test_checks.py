"""What is refused and what is warned of before anything is submitted; each message has key, value and way out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import Config
from launch.errors import Exit
from launch.slurm.checks import check
from launch.slurm.client.protocol import SiteInfo
from launch.slurm.errors import ShapeError
from launch.slurm.findings import Finding, refuse
from launch.slurm.fitting import is_preemptible
from launch.slurm.places import SOCKET_LIMIT, Place, places
from launch.slurm.shapes import SlurmPlacement, jobs_of
from tests.unit.launch.slurm.configs import make
from tests.unit.launch.slurm.sites import Nodes, site


def found(config: Config, placement: SlurmPlacement = "linked", at: SiteInfo | None = None) -> list[Finding]:
    return check(config, jobs_of(config, placement), at)


def only(findings: list[Finding], *, fatal: bool) -> str:
    (one,) = [finding for finding in findings if finding.fatal == fatal]
    assert "\n" not in one.message
    return one.message


def test_what_can_be_had_is_neither_refused_nor_warned_of() -> None:
    config = make("cluster.partition=cpu", "fleet.partition=gpu", "fleet.gpus_per_replica=1")
    for placement in ("het", "linked"):
        assert found(config, placement, site()) == []  # type: ignore[arg-type]
    assert found(make("cluster.partition=gpu"), "colocated", site()) == []


@pytest.mark.parametrize("placement", ["het", "linked", "colocated"])
@pytest.mark.parametrize("option", ["--array=1-3", "-a 1-3", "-a1-3"])
def test_parity_b26_an_array_of_a_run_is_refused(placement: SlurmPlacement, option: str) -> None:
    message = only(found(make(f"cluster.extra_sbatch=['{option}']"), placement), fatal=True)
    assert message.startswith(f"cluster.extra_sbatch[0] got '{option}'") and "sweep with -m" in message


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ("--partition=x", "cluster.partition"),
        ("-t 10", "time_min"),
        ("--signal=USR1@5", "drain"),
        ("mail", "--mail-type=END"),
    ],
)
def test_options_that_the_run_decides_are_not_free(option: str, way_out: str) -> None:
    assert way_out in only(found(make(f"cluster.extra_sbatch=['{option}']")), fatal=True)


@pytest.mark.parametrize(
    "option", ["--mail-type=END", "--hint=nomultithread", "--exclusive", "-L matlab", "--switches=1@10"]
)
def test_other_options_are_free(option: str) -> None:
    assert found(make(f"cluster.extra_sbatch=['{option}']")) == []


def test_parity_b26_overlapping_het_partitions_are_refused_where_nodes_of_their_own_are_short() -> None:
    small = site(Nodes("cpu", 4, 8, 16000, ("cpu", "other")))
    config = make("cluster.partition=cpu", "pools.run.partition=other")
    message = only(found(config, "het", small), fatal=True)
    assert "needs 5 nodes for control, init, run, eval, fleet" in message and "there are 4" in message
    assert "placement=colocated or linked" in message
    assert found(config, "linked", small) == []
    assert found(config, "het", site(Nodes("cpu", 5, 8, 16000, ("cpu", "other")))) == []


def test_the_smallest_set_of_components_in_each_others_way_is_named() -> None:
    tight = site(Nodes("cpu", 9, 8, 16000, ("cpu",)), Nodes("big", 1, 64, 500000, ("cpu",)))
    config = make("pools.run.cpus_per_task=32", "pools.eval.cpus_per_task=16")
    message = only(found(config, "het", tight), fatal=True)
    assert "needs 2 nodes for run, eval" in message and "there are 1" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pools.run.cpus_per_task=9"], ["pools.run asks for 9 CPUs", "has 8", "pools.run.cpus_per_task"]),
        (["pools.run.workers=9"], ["pools.run asks for 9 CPUs", "processes a node"]),
        (["pools.eval.mem_gib=16"], ["pools.eval asks for 16384 MiB", "has 16000", "pools.eval.mem_gib"]),
        (["fleet.gpus_per_replica=1"], ["fleet asks for 1 GPUs", "partition cpu has 0", "fleet.gpus_per_replica"]),
        (["pools.run.nodes=6"], ["pools.run asks for 6 nodes", "5 of 5"]),
        (["pools.run.nodes=5", "cluster.exclude=[cpu1]"], ["pools.run asks for 5 nodes", "4 of 5"]),
        (["cluster.constraint=gpu"], ["control asks for 1 nodes", "0 of 5", "constraint"]),
        (["pools.run.time_min=1441"], ["got 1441", "partition cpu allows 1440"]),
        (["pools.init.partition=fast"], ["pools.init.partition got fast", "this site has cpu, preempt, gpu"]),
    ],
)
def test_shapes_that_the_site_cannot_give_are_refused(overrides: list[str], words: list[str]) -> None:
    messages = [one.message for one in found(make(*overrides), "linked", site()) if one.fatal]
    assert any(all(word in message for word in words) for message in messages), messages


def test_nodes_out_of_service_are_worth_a_warning_only() -> None:
    at = site(Nodes("cpu", 1, 8, 16000, ("cpu",)), Nodes("old", 1, 8, 16000, ("cpu",), state="down"))
    message = only(found(make("pools.run.nodes=2"), "linked", at), fatal=False)
    assert "1 are in service now" in message


@pytest.mark.parametrize(
    ("key", "said", "silent"),
    [("mem_gib", "control", "pools.init"), ("qos", "pools.run", "pools.eval"), ("account", "pools.eval", "fleet")],
)
def test_what_sbatch_hands_on_to_a_later_component_must_be_said(key: str, said: str, silent: str) -> None:
    """Slurm gives --mem, --qos and --account of one component to the later ones without their own."""
    config = make(f"{said}.{key}=4")
    message = only(found(config, "het"), fatal=True)
    assert message.startswith(f"{silent}.{key} is null after {said}.{key}") and "placement=linked" in message
    assert found(config, "linked") == []


def test_what_the_cluster_says_for_all_is_said_for_each() -> None:
    assert found(make("cluster.account=a", "cluster.qos=q", "pools.init.qos=r"), "het") == []


def test_linked_jobs_count_against_the_submissions_an_hour() -> None:
    config = make("cluster.max_submissions_per_hour=4")
    assert "submits 5 jobs" in only(found(config, "linked"), fatal=True)
    assert found(config, "het") == []


def test_colocated_is_one_job_and_has_one_partition() -> None:
    config = make("pools.run.partition=cpu", "fleet.partition=gpu")
    assert "name partition cpu and gpu" in only(found(config, "colocated"), fatal=True)


def test_of_several_partitions_one_is_enough() -> None:
    large, small = Nodes("big", 5, 8, 16000, ("big",)), Nodes("small", 5, 1, 100, ("small",))
    at = site(small, large)
    assert found(make("cluster.partition='small,big'", "pools.run.cpus_per_task=4"), "linked", at) == []
    assert found(make("cluster.partition='small,big'", "pools.run.cpus_per_task=4"), "het", at) == []
    message = only(found(make("pools.run.partition='small,nowhere'"), "linked", at), fatal=True)
    assert message.startswith("pools.run.partition got nowhere")
    assert is_preemptible(site(), "cpu,preempt") and not is_preemptible(site(), "cpu,gpu")


def test_preemption_is_warned_of_by_what_it_will_do() -> None:
    config = make("cluster.partition=preempt")
    messages = " ".join(one.message for one in found(config, "linked", site()))
    assert "5 s (GraceTime)" in messages and "checkpoint.turns=1" in messages
    assert not any(one.fatal for one in found(config, "linked", site()))
    assert found(make("cluster.partition=preempt", "checkpoint.turns=1"), "linked", site()) == []
    assert found(config, "linked", site(grace_time_s=60)) == []
    assert found(config, "linked", site(preempt_type="preempt/none")) == []
    hasty = site(grace_time_s=60, kill_wait_s=10)
    assert all("KillWait is 10 s" in one.message and not one.fatal for one in found(config, "linked", hasty))
    assert len(found(config, "linked", hasty)) == 5, "one a component"
    assert found(config, "linked", site(grace_time_s=60, kill_wait_s=10, signals_preempted=True)) == []
    het = " ".join(one.message for one in found(config, "het", site(grace_time_s=60)))
    assert "losing one component stops them all" in het
    suspends = " ".join(one.message for one in found(config, "linked", site(preempt_mode="SUSPEND")))
    assert "leases run out" in suspends
    cancels = " ".join(one.message for one in found(config, "linked", site(preempt_mode="CANCEL")))
    assert "cluster.continue_by=resubmit" in cancels


def test_a_slow_backfill_is_warned_of_for_het_alone() -> None:
    at = site(bf_interval_s=300)
    assert "300 s" in only(found(make("fleet.partition=gpu"), "het", at), fatal=False)
    assert found(make("fleet.partition=gpu"), "linked", at) == []


def test_preemptible_is_what_the_site_says() -> None:
    assert is_preemptible(site(), "preempt") and not is_preemptible(site(), "cpu")
    assert not is_preemptible(site(), "nowhere") and not is_preemptible(site(), None)
    assert not is_preemptible(site(preempt_type="preempt/none"), "preempt")


def test_paths_of_which_the_job_sees_nothing() -> None:
    config = make()
    jobs = jobs_of(config, "linked")
    closed = Place(key="the interpreter", path=Path("/root/python"), way_out="install it", uid=7, blocked=Path("/root"))
    message = only(check(config, jobs, None, [closed]), fatal=True)
    assert message == "the interpreter /root/python cannot be read by the job: /root is closed to uid 7; install it"
    local = [
        Place(key=key, path=Path("/tmp/x"), way_out="", uid=7, local=True, filesystem="ext4 (/)")
        for key in ("run_dir", "store")
    ]
    assert only(check(config, jobs, None, local), fatal=False).startswith("run_dir and store lie on ext4 (/), which")
    long = Place(key="cluster.scratch", path=Path("/l"), way_out="shorter", uid=7, socket_bytes=SOCKET_LIMIT + 1)
    assert "takes 108 of 107 bytes" in only(check(config, jobs, None, [long]), fatal=True)
    percent = make(run_dir="/shared/50%/one")
    assert "without %" in only(check(percent, jobs_of(percent, "het")), fatal=True)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory into which others may look: pytest closes the one above its own whenever a session begins."""
    with tempfile.TemporaryDirectory(prefix="rollmill-test-") as name:
        place = Path(name).resolve()
        for parent in (place, *place.parents):
            if parent.stat().st_uid == os.getuid():
                parent.chmod(parent.stat().st_mode | 0o755)
        yield place


def test_places_are_looked_at_with_the_eyes_of_the_jobs_user(open_place: Path) -> None:
    closed = open_place / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python").touch()
    open_link = open_place / "python"
    open_link.symlink_to(closed / "python")
    config = make("cluster.scratch=/a/quite/long/directory/for/scratch", run_dir=f"{open_place}/runs/one")

    def seen(uid: int) -> dict[str, Place]:
        return {place.key: place for place in places(config, str(open_link), uid=uid)}

    assert seen(os.getuid())["the interpreter"].blocked is None
    assert seen(os.getuid() + 12345)["the interpreter"].blocked == closed  # also behind the link
    assert seen(0)["the interpreter"].blocked is None
    assert seen(os.getuid())["run_dir"].path == open_place  # the nearest that exists
    assert seen(0)["run_dir"].filesystem
    assert seen(0)["cluster.scratch"].socket_bytes > SOCKET_LIMIT


def test_the_first_refusal_ends_the_command_with_code_2_and_warnings_are_lines() -> None:
    with pytest.raises(ShapeError, match="that one") as caught:
        refuse([Finding("a", "that one"), Finding("b", "not this")])
    assert caught.value.exit_code == Exit.WRONG
    assert refuse([Finding("a", "beware", fatal=False)]) == ["beware"]
