"""Reports to rewards: what a pass is, what points to a cheat, what is the data's own fault."""

from __future__ import annotations

from typing import Any

import pytest

from stages.errors import VerifierError
from tests.support import swe_instance as small
from workflows.tasks.swe import grading

FILES = {name: text.encode() for name, text in small.FILES.items()}
CHANGED = {small.TESTS: ["test_count", "test_nothing", "test_page", "test_top", "test_top_is_told"]}
ALL = [*small.FAIL_TO_PASS, *small.PASS_TO_PASS]


def phases(test: str, *, call: str = "passed", teardown: str = "passed") -> list[dict[str, Any]]:
    outcomes = {"setup": "passed", "call": call, "teardown": teardown}
    return [{"id": test, "when": when, "outcome": outcome} for when, outcome in outcomes.items()]


def run(
    *, failing: tuple[str, ...] = (), ids: list[str] = ALL, end: bool = True, patched: tuple[str, ...] = ()
) -> grading.Heard:
    records: list[dict[str, Any]] = [{"changed": CHANGED}]
    for test in ids:
        records += phases(test, call="failed" if test in failing or failing == ("all",) else "passed")
    return grading.hear([*records, {"end": 0, "patched": list(patched)}] if end else records, hidden())


def hidden(**changes: Any) -> grading.Tests:
    return grading.tests_of({"task_id": "t", **small.row(**changes)}, FILES.get)


NAMES = frozenset(CHANGED[small.TESTS])
HALF = frozenset({"test_top", "test_page"})


def canaries_of(names: grading.Canaries) -> list[str]:
    return [test for test in ALL if grading.function_of(test) in names]


def honest(names: grading.Canaries, *failing: str, **options: Any) -> tuple[grading.Canaries, grading.Heard]:
    """A run whose canaries fail, and of the others these."""
    return names, run(failing=(*canaries_of(names), *failing), **options)


def judged(*runs: tuple[grading.Canaries, grading.Heard]) -> tuple[float, dict[str, float]]:
    reward = grading.judge(hidden(), runs)
    return reward.value, reward.parts


@pytest.mark.parametrize("names", [HALF, NAMES, frozenset()])
def test_all_passed_where_they_count_and_failed_as_canaries_is_one(names: grading.Canaries) -> None:
    assert judged(honest(names), honest(NAMES - names)) == (1.0, {"f2p": 1.0, "p2p": 1.0, "canary": 1.0, "format": 1.0})


@pytest.mark.parametrize("names", [HALF, NAMES - HALF, NAMES, frozenset()])
def test_one_failure_is_zero_and_the_parts_say_where(names: grading.Canaries) -> None:
    lost = small.FAIL_TO_PASS[0]
    value, parts = judged(honest(names, lost), honest(NAMES - names, lost))
    assert (value, parts["p2p"], parts["canary"]) == (0.0, 1.0, 1.0) and parts["f2p"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "second",
    [
        run(),
        run(failing=tuple(ALL[3:])),
        run(ids=ALL[3:]),
        run(failing=tuple(canaries_of(NAMES - HALF)), patched=("x",)),
    ],
    ids=["all pass", "one passes", "one was not seen", "pytest was patched"],
)
def test_canaries_that_did_not_fail_are_a_cheat(second: grading.Heard) -> None:
    value, parts = judged(honest(HALF), (NAMES - HALF, second))
    assert (value, parts["canary"]) == (0.0, 0.0)


def test_a_run_that_forges_beside_one_that_does_not_is_a_cheat_whichever_is_first() -> None:
    """What a project learns from the first run does not help it in the second: both count."""
    for first, second in ((HALF, NAMES - HALF), (NAMES - HALF, HALF)):
        assert judged((first, run()), honest(second)) == (0.0, {"f2p": 1.0, "p2p": 1.0, "canary": 0.0, "format": 1.0})


def test_a_run_without_an_end_and_a_run_too_few_are_nothing() -> None:
    assert judged(honest(HALF, end=False), honest(NAMES - HALF))[0] == 0.0
    assert judged(honest(NAMES), honest(frozenset(), end=False))[0] == 0.0
    assert judged(honest(frozenset()))[0] == 0.0
    assert judged()[0] == 0.0


def test_what_cannot_be_imported_or_does_not_end_is_no_format() -> None:
    assert judged(honest(HALF, end=False), honest(NAMES - HALF))[1]["format"] == 0.0
    assert judged(honest(HALF))[1]["format"] == 0.0
    names, heard = honest(HALF)
    heard.broken[small.TESTS] = "ImportError"
    value, parts = judged((names, heard), honest(NAMES - HALF))
    assert (value, parts["format"], parts["canary"]) == (1.0, 0.0, 1.0), "the other parts say what passed"


def test_a_test_of_another_file_cannot_be_a_canary_and_counts_in_both_runs() -> None:
    inherited = {small.TESTS: [name for name in CHANGED[small.TESTS] if name != "test_page"]}
    page = f"{small.TESTS}::test_page"

    def made(names: grading.Canaries, *failing: str) -> tuple[grading.Canaries, grading.Heard]:
        heard = honest(names - {"test_page"}, *failing)[1]
        heard.changed = inherited
        return names, heard

    assert judged(made(HALF), made(NAMES - HALF))[0] == 1.0
    assert judged(made(HALF), made(NAMES - HALF, page))[1]["p2p"] == pytest.approx(2 / 3)


def test_each_function_is_a_canary_once_and_the_draw_differs() -> None:
    drawn = [grading.draw(hidden()) for _ in range(30)]
    assert all(first | second == NAMES and not first & second for first, second in drawn)
    assert len({first for first, _ in drawn}) > 5


@pytest.mark.parametrize(
    "records",
    [
        phases("t", teardown="failed"), phases("t", call="skipped"), phases("t")[1:], phases("t")[:2], phases("t") * 2,
        [*phases("t", call="failed"), *phases("t")], list(reversed(phases("t"))), phases("t", call="xfail"),
    ],
    ids=["teardown", "skipped", "no setup", "no teardown", "twice", "failed, then passed", "disorder", "xfail"],
)  # fmt: skip
def test_only_three_phases_in_order_are_a_pass(records: list[dict[str, Any]]) -> None:
    only = grading.Tests(["t"], [], {})
    assert grading.passed("t", grading.hear(phases("t"), only).outcomes)
    assert not grading.passed("t", grading.hear(records, only).outcomes)


def test_an_id_that_was_cut_at_a_blank_stands_for_all_that_it_was_cut_from() -> None:
    outcomes = {"f::t[a - b]": "passed", "f::t[a - c]": "failed", "f::t[x y]": "passed", "f::tt": "failed"}
    assert [grading.passed(test, outcomes) for test in ("f::t[a", "f::t[x", "f::t[y")] == [False, True, False]


def test_hidden_files_are_whole_and_made_from_the_given_repository() -> None:
    assert hidden().files == {small.TESTS: small.HIDDEN_TESTS.encode()}
    assert hidden().names == CHANGED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"FAIL_TO_PASS": [f"{small.TESTS}::test_that_nobody_wrote"]}, "no test .*test_that_nobody_wrote exists"),
        ({"PASS_TO_PASS": ["tests/test_none.py::test_x"]}, "test_none.py, which does not exist"),
        ({"FAIL_TO_PASS": ["../x.py::test_x"]}, "does not exist"),
        ({"test_patch": small.diff(small.TESTS, "other\n", "x\n")}, "test_patch: .*does not fit"),
    ],
)
def test_data_that_nobody_can_be_graded_by_is_the_rows_own_fault(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(VerifierError, match=said) as raised:
        hidden(**changes)
    assert raised.value.detail["final"] is True


def test_records_that_only_a_project_can_have_told_change_nothing() -> None:
    told = [{"changed": CHANGED}, 5, None, ["id"], {"unreadable": "x", "text": "y"}, {"changed": {}}, {"changed": 3}]
    heard = grading.hear([*told, {"id": "of nobody", "when": "setup", "outcome": "passed"}], hidden())
    assert (heard.changed, heard.unreadable, heard.outcomes) == (CHANGED, {}, {})
    assert grading.hear([{"unreadable": "x", "text": "y"}], hidden()).unreadable == {"x": "y"}
    assert grading.hear([{"hello": 1}], hidden()).changed is None


def test_reaching_for_the_tests_is_a_cheat() -> None:
    caught = honest(HALF)[1]
    caught.patched.append("/testbed/src/x.py: _getframe")
    assert judged((HALF, caught), honest(NAMES - HALF)) == (0.0, {"f2p": 1.0, "p2p": 1.0, "canary": 0.0, "format": 1.0})
    assert grading.hear([{"pried": "x"}, {"end": 0, "patched": 5}], hidden()).patched == ["x", "end"]
