"""Log parsers: what runners really print, as statuses by test."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from workflows.grading.logs import PARSERS

LOGS = Path(__file__).parent / "data" / "logs"
P, F, E, S = "passed", "failed", "error", "skipped"
GOLDEN: dict[str, dict[str, str]] = {
    "pytest": {
        "t/test_a.py::test_p[a - b]": P, "t/test_a.py::test_p[c d]": P, "t/test_a.py::test_f": F,
        "t/test_a.py::test_s": S, "t/test_a.py::test_x": P, "t/test_a.py::test_e": E, "t/test_a.py::TestC::test_m": P,
        "t/test_b.py": E,
    },
    "unittest": {
        "test_doc (u.C.test_doc)": P, "Says what it does.": P, "test_err (u.C.test_err)": E,
        "test_fail (u.C.test_fail)": F, "test_ok (u.C.test_ok)": P, "test_prints (u.C.test_prints)": P,
        "test_skip (u.C.test_skip)": S, "test_xf (u.C.test_xf)": P,
    },
    "django": {
        "test_doc (app.tests.A.test_doc)": P, "A view answers.": P, "test_fail (app.tests.A.test_fail)": F,
        "test_loud (app.tests.A.test_loud)": P, "test_ok (app.tests.A.test_ok)": P,
        "test_skip (app.tests.A.test_skip)": S, "test_err (app.tests.B.test_err)": E,
        "test_sub (app.tests.B.test_sub)": F, "test_sub (app.tests.B.test_sub) (i=1)": F,
    },
    "go": {
        "TestParse": F, "TestParse/empty": P, "TestParse/two_words": F, "TestSlow": S, "TestPrint": P,
        "example.org/words/broken": E, "example.org/json.TestA": P,
    },
    "cargo": {
        "tests::counts": P, "tests::empty": F, "tests::network": S, "tests::panics": P, "tests::prints": P,
        "src/lib.rs - count (line 3)": P, "other": E,
    },
    "jest": {
        "words > count > counts two": P, "words > count > counts none": S, "words > is there": P, "stands alone": P,
        "lines > splits lines": F, "lines > keeps the last": P, "src/broken.test.js": E,
    },
}  # fmt: skip
"""pytest 9, unittest of Python 3.11 and Django 5 were run; go, cargo and jest follow their documented output."""


@pytest.mark.parametrize("name", PARSERS)
def test_a_runners_output(name: str) -> None:
    log = (LOGS / f"{name}.log").read_text()
    assert PARSERS[name](log) == GOLDEN[name]
    coloured = "\n".join(f"\x1b[32m{line}\x1b[0m" for line in log.splitlines())
    assert PARSERS[name](coloured) == GOLDEN[name]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text", ["", "\x00", "::" * 10_000, "(" * 10_000, "--- PASS: " * 3000, "test " * 5000, "{" * 5000]
)
def test_a_log_that_is_none_says_nothing(name: str, text: str) -> None:
    assert PARSERS[name](text) == {}


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text",
    ["a::", "a:: PASSED (", "a:: PASSED", "test a ... ok <", "test a - should panic", "x ... skipped", "✓ (1", " [1%]",
     "--- PASS: a (1", "test_a (m.C) (", "FAIL: ", "[ ", "\x1b[1"],
)  # fmt: skip
def test_a_log_that_was_made_to_take_long_does_not(name: str, text: str) -> None:
    began = time.process_time()
    PARSERS[name]("\n".join([text * (1 << 18), *[text * (3900 // len(text))] * 100]))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("t.py::a PASSED (why (not)) [ 5%]", {"t.py::a": P}),
        ("t.py::p[x PASSED y] FAILED   [100%]", {"t.py::p[x PASSED y]": F}),
        ("t.py::a PASSED and more", {}), ("t.py::a PASSED (why", {}), ("t.py:: PASSED", {}),
        ("t.py::a PASSED", {"t.py::a": P}),
    ],
)  # fmt: skip
def test_lines_of_a_verbose_run(line: str, found: dict[str, str]) -> None:
    assert PARSERS["pytest"](line) == found


def test_the_end_of_a_long_reason_is_not_needed() -> None:
    log = "t.py::a PASSED\n= short test summary info =\nERROR t.py::a - " + "because " * 1000
    assert PARSERS["pytest"](log) == {"t.py::a": E}


def test_of_two_statuses_the_worse_one_counts() -> None:
    assert PARSERS["go"]("--- FAIL: TestA (0.00s)\n--- PASS: TestA (0.00s)\n") == {"TestA": F}
