"""What training leaves: the table, the report, the state that comes back, the panels of the picture."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from workflows.errors import TrainError
from workflows.train import figures, plots, report
from workflows.train.collecting import Wave, task_at, wave_size
from workflows.train.records import COLUMNS, Places, Record, State, read_state, table_text, write_state

RECORDS = [
    Record(step=0, heldout=0.25, heldout_low=0.2, heldout_high=0.3, heldout_problems=512, elapsed_s=10),
    Record(
        step=1, reward=0.25, groups=["a", "b"], groups_asked=5, gap_max=1e-5, gap_tokens=70, tokens=100, rollout_s=3
    ),
    Record(step=2, reward=0.5, groups=["c", "a"], groups_asked=4, gap_max=3e-5, gap_tokens=30, tokens=100, train_s=1),
]


def test_the_table_has_a_line_an_update_and_empty_cells_where_nothing_was_measured() -> None:
    lines = list(csv.DictReader(table_text(RECORDS).splitlines()))
    assert [line["step"] for line in lines] == ["0", "1", "2"] and tuple(lines[0]) == COLUMNS
    assert lines[0]["heldout"] == "0.25" and lines[1]["heldout"] == "" and lines[2]["gap_max"] == "3e-05"


def test_the_report_adds_up_and_counts_groups_that_were_used_twice() -> None:
    made = report.summary(RECORDS, seed=3)
    assert (made["seed"], made["updates"], made["groups_asked"], made["groups_kept"]) == (3, 2, 9, 4)
    assert made["groups_used_twice"] == 1 and made["gap_max"] == 3e-5 and made["gap_tokens"] == 100
    assert made["tokens_per_s"] == 50 and made["heldout_first"] == made["heldout_last"]
    assert "0.250 (95 %: 0.200 to 0.300)" in report.lines(made)
    assert "not measured" in report.lines(report.summary([]))


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    state = State(version=2, cursor=9, rate=0.4, seq=77, ahead=Wave(3, 0, 9, 4), records=RECORDS)
    assert read_state(Places(tmp_path)) is None
    write_state(Places(tmp_path), state)
    assert read_state(Places(tmp_path)) == state


@pytest.mark.parametrize(("content", "said"), [(b"{", "cannot be read"), (b'{"v":2}', "version 2, this trainer")])
def test_a_state_that_is_not_ours_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "train").mkdir()
    Places(tmp_path).state.write_bytes(content)
    with pytest.raises(TrainError, match=said):
        read_state(Places(tmp_path))


def test_every_pass_over_the_data_set_has_each_task_once_in_an_order_of_its_own() -> None:
    tasks = [f"t{number}" for number in range(20)]
    passes = [[task_at(tasks, 1, place) for place in range(20 * turn, 20 * turn + 20)] for turn in range(3)]
    assert all(sorted(one) == sorted(tasks) for one in passes) and len({tuple(one) for one in passes}) == 3
    assert [task_at(tasks, 2, place) for place in range(20)] != passes[0]


def test_a_wave_is_as_large_as_the_share_that_counted_and_at_most_tenfold() -> None:
    assert [wave_size(6, rate) for rate in (1.0, 0.5, 0.4, 0.0)] == [6, 12, 15, 60]


def test_every_panel_has_a_value_for_an_update() -> None:
    for _, lines in plots.PANELS:
        for name, value_of in lines:
            record = Record(step=1, heldout=0.5, gap_max=1e-6, gap_mean=1e-7)
            assert isinstance(value_of(record), (int, float)), name


def test_figures_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main([str(tmp_path / "x.png"), f"one={tmp_path}"]) == 1
    assert "nothing was trained there" in capsys.readouterr().err
    assert figures.main([str(tmp_path / "x.png"), "one"]) == 1
    assert "wanted NAME=RUN_DIR" in capsys.readouterr().err
