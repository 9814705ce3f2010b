"""The parity tests can fail: each does when the mending of its fault is switched off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.mutants import MUTANTS, REPOSITORY, UNCHANGED

NUMBERS = range(1, 41)


def test_each_public_bug_has_a_test_and_a_mutant() -> None:
    text = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_parity_*.py"))
    for number in NUMBERS:
        assert f"def test_b{number:02d}_" in text
        assert any(mutant.name.startswith(f"b{number:02d}_") for mutant in MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.timeout(1800)
def test_every_mutant_is_noticed_and_without_one_the_copy_passes() -> None:
    tried = [sys.executable, "-P", "-m", "tests.mutants"]
    done = subprocess.run(tried, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        [f"passed {UNCHANGED.name}", *(f"noticed {mutant.name}" for mutant in MUTANTS)]
    )
