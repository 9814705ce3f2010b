"""The small notations of Slurm's commands."""

from __future__ import annotations

import pytest

from launch.slurm.client import fields


@pytest.mark.parametrize(
    ("said", "nodes"),
    [
        ("cpu3", ("cpu3",)),
        ("cpu[1-3]", ("cpu1", "cpu2", "cpu3")),
        ("cpu5,gpu[2,4-5]", ("cpu5", "gpu2", "gpu4", "gpu5")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("r[1-2]n[0-1]", ("r1n0", "r1n1", "r2n0", "r2n1")),
        ("a[1]-ib,b", ("a1-ib", "b")),
        ("", ()), ("(null)", ()), ("None assigned", ()), ("N/A", ()),
    ],
)  # fmt: skip
def test_node_lists(said: str, nodes: tuple[str, ...]) -> None:
    assert fields.node_names(said) == nodes


@pytest.mark.parametrize("said", ["cpu[1-", "cpu[a-b]", "cpu]1[", "n[1-999999999]", "n[0-999]m[0-999]"])
def test_what_is_no_node_list_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="node"):
        fields.node_names(said)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("5:00", 300.0), ("2-03:05:00", 183900.0), ("1-00", 86400.0), ("01:02:03", 3723.0), ("00:01.500", 1.5),
     ("34", 34.0), ("UNLIMITED", None), ("Partition_Limit", None), ("", None), ("soon", None)],
)  # fmt: skip
def test_spans(said: str, seconds: float | None) -> None:
    assert fields.seconds(said) == seconds


def test_a_limit_is_rounded_up_to_minutes() -> None:
    assert fields.limit_min("00:00:30") == 1
    assert fields.limit_min("2-03:04:05") == 3065
    assert fields.limit_min("infinite") is None


def test_moments_are_utc() -> None:
    assert fields.unix_time("1970-01-02T00:00:00") == 86400
    assert fields.unix_time("1795288172") == 1795288172
    assert [fields.unix_time(word) for word in ("N/A", "Unknown", "None", "0", "(null)", "tomorrow")] == [None] * 6


def test_amounts() -> None:
    assert [fields.memory_mib(said) for said in ("16000", "100M", "2G", "15.5G", "500Mc", "2Gn", "?")] == [
        16000, 100, 2048, 15872, 500, 2048, None,
    ]  # fmt: skip
    assert fields.gpus_in_tres("cpu=1,gres/gpu=3,gres/gpu:a100=3") == 3
    assert fields.gpus_in_tres("cpu=1,gres/gpu:a100=3,gres/gpu:h100=1") == 4
    assert fields.gpus_in_tres("billing=1,cpu=1,mem=100M") == 0
    assert fields.gpus_in_gres("gpu:fake:2(S:0-1),shard:8,gpu:4") == 6
    assert fields.gpus_in_gres("gpu") == 1
    assert fields.gpus_in_gres("(null)") == 0


def test_exits() -> None:
    assert fields.wait_status("768") == (3, 0)
    assert fields.wait_status(9) == (0, 9)
    assert fields.wait_status("75") == (0, 75)
    assert fields.wait_status(75 << 8) == (75, 0)
    assert fields.exit_pair("3:0") == fields.exit_column("3:0") == fields.exit_column("768") == (3, 0)
    assert fields.exit_pair("0:9") == (0, 9)


def test_ids() -> None:
    assert fields.job_ids("9") == ("9", None)
    assert fields.job_ids("9+1") == ("9", 1)
    assert fields.job_ids("9+1.batch") == ("9", 1)
