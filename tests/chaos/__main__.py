"""`python -m tests.chaos --kills N --seed S [--json] [--keep DIR]`: real runs under random faults, and what held.

Exit code 0 where every invariant held in every run, else 1; a run that broke one is kept and named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from tests.chaos import schedule
from tests.chaos.play import Play, Played


def campaign(kills: int, seed: int, base: Path, *, say: Any = lambda text: None) -> dict[str, Any]:
    """Play runs until `kills` signals have landed; the report as JSON values."""
    played: list[tuple[int, Played]] = []
    for number, strikes in enumerate(schedule.runs(seed)):
        done = sum(len(one.landed) for _, one in played)
        if done >= kills:
            break
        place = base / f"seed{seed}-run{number}"
        place.mkdir(parents=True)
        one = Play(place, strikes).to_the_end()
        played.append((number, one))
        say(f"run {number}: {len(one.landed)} landed, {one.missed} missed, {one.starts} starts, {one.wall_s:.1f} s, "
            f"{one.outcome} {'; '.join(one.violations) or 'ok'}")  # fmt: skip
        if not one.violations:
            shutil.rmtree(place)
    return _report(kills, seed, played, base)


def _report(kills: int, seed: int, played: list[tuple[int, Played]], base: Path) -> dict[str, Any]:
    landed = [hit for _, one in played for hit in one.landed]
    cells = Counter((hit.kind, hit.phase) for hit in landed)
    total: Counter[str] = Counter()
    for _, one in played:
        total.update(one.outcome)
    return {
        "seed": seed, "asked": kills, "kills": len(landed), "runs": len(played),
        "double": sum(hit.double for hit in landed), "missed": sum(one.missed for _, one in played),
        "signals": dict(Counter(hit.signal for hit in landed)),
        "coverage": {kind: {phase: cells[kind, phase] for phase in schedule.PHASES} for kind in schedule.KINDS},
        "rollouts": dict(total), "wall_s": round(sum(one.wall_s for _, one in played), 1),
        "violations": [
            {"run": number, "what": what, "kept": str(base / f"seed{seed}-run{number}")}
            for number, one in played for what in one.violations
        ],
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'':12}" + "".join(f"{phase:>9}" for phase in schedule.PHASES)]
    lines += [
        f"{kind:12}" + "".join(f"{count:>9}" for count in row.values()) for kind, row in report["coverage"].items()
    ]
    signals = ", ".join(f"{count} SIG{name}" for name, count in sorted(report["signals"].items()))
    rollouts = ", ".join(f"{count} {name}" for name, count in report["rollouts"].items())
    lines += [
        f"{report['kills']} signals ({signals}), {report['double']} as the second of a double fault, "
        f"{report['missed']} came too late, {report['runs']} runs, {report['wall_s']:g} s, seed {report['seed']}",
        f"rollouts: {rollouts}",
        *(f"BROKEN in run {broken['run']}: {broken['what']} ({broken['kept']})" for broken in report["violations"]),
    ]
    if not report["violations"]:
        lines.append("held: counts, none lost, none twice, rows readable, shapes, index = journal, nothing left over")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plan", type=int, metavar="RUNS", help="print the schedule of so many runs and end")
    parser.add_argument("--keep", type=Path, help="directory for the runs; those that hold are removed")
    given = parser.parse_args(argv)
    if given.plan is not None:
        planned = [[strike.plain() for strike in run] for run in islice(schedule.runs(given.seed), given.plan)]
        print(json.dumps(planned, indent=1))
        return 0
    base = given.keep or Path(tempfile.mkdtemp(prefix="rollmill-chaos-"))
    report = campaign(
        given.kills, given.seed, base.absolute(), say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    print(json.dumps(report) if given.json else table(report))
    if given.keep is None and not report["violations"]:
        base.rmdir()
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
