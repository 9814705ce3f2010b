"""The parity tests can fail: each does when the mending of its fault is switched off."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants import tried
from tests.support.mutants import LEDGER, MUTANTS, REPOSITORY, SANDBOXES, STUCK, WORKERS, copy, run

NUMBERS = (*range(1, 16), 17, 18, *range(19, 28), 28, 32, 33, 34, 35, 37, 38, 39, 40)


def test_each_public_bug_has_a_test_and_a_mutant() -> None:
    text = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_parity_*.py"))
    for number in NUMBERS:
        assert f"def test_b{number:02d}_" in text
        assert any(mutant.name.startswith(f"b{number:02d}_") for mutant in MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_without_a_mutant_the_copy_passes(tmp_path: Path) -> None:
    copy(tmp_path)
    done = run(tmp_path, "test_parity_ledger or b05 or b33 or b39", LEDGER, WORKERS, SANDBOXES, STUCK)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(900)
def test_every_mutant_is_noticed() -> None:
    with ThreadPoolExecutor(3) as pool:
        complaints = [complaint for complaint in pool.map(tried, MUTANTS) if complaint is not None]
    assert not complaints, "\n".join(complaints)
