"""Every parity test fails when its mending is switched off: `python -P -m tests.mutants [NAME...]`; exits 1 if not."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.mutants import MUTANTS, Mutant, MutantError, check


def tried(mutant: Mutant) -> str | None:
    """None where the mutant was noticed, else what went wrong."""
    with tempfile.TemporaryDirectory(prefix="rollmill-mutant-") as directory:
        try:
            check(mutant, Path(directory))
        except MutantError as error:
            return str(error)
    return None


def main(names: list[str]) -> int:
    """Try the mutants whose name begins with one of `names`, all without any; prints one line each."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name.startswith(tuple(names))]
    with ThreadPoolExecutor(3) as pool:
        complaints = list(pool.map(tried, chosen))
    for mutant, complaint in zip(chosen, complaints, strict=True):
        print(f"{'noticed' if complaint is None else 'SURVIVED'} {mutant.name}")
        if complaint is not None:
            print(complaint, file=sys.stderr)
    return 1 if any(complaints) or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
