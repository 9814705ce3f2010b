"""`rollmill logs`: where the processes' logs are, and their last lines."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launch.errors import CommandError, Exit
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser

_POLL_S = 0.5
_TAIL_BYTES = 256 * 1024
_SILENT_POLLS = 120


def run(name: str, args: Sequence[str]) -> int:
    """Print each log's path and last lines; with --follow, what comes after until interrupted."""
    parser = verb_parser(name)
    parser.add_argument("--stage", help="only logs of this kind: router, replica, init, run, eval")
    parser.add_argument("--attempt", type=int, help="which start of the run; default: the last")
    parser.add_argument("--lines", type=int, default=10, metavar="N", help="last lines of each (default 10)")
    parser.add_argument("--follow", action="store_true", help="go on printing what is written")
    chosen = parser.parse_args(args)
    run_dir = find_run_dir(chosen.run_dir)
    files = log_files(run_dir, chosen.attempt, chosen.stage)
    for file in files:
        sys.stdout.write(f"==> {file} <==\n")
        sys.stdout.writelines(line + "\n" for line in last_lines(file, chosen.lines))
    sys.stdout.flush()
    if chosen.follow:
        for file, text in follow(lambda: log_files(run_dir, chosen.attempt, chosen.stage)):
            sys.stdout.write(f"{file.name}: {text}\n")
            sys.stdout.flush()
    return Exit.DONE


def log_files(run_dir: Path, attempt: int | None, stage: str | None) -> list[Path]:
    """The logs of one start of a run, by name.

    Raises:
        CommandError: no such attempt, or no log of that stage.
    """
    attempts = {int(place.name.removeprefix("attempt_")): place for place in (run_dir / "logs").glob("attempt_[0-9]*")}
    if not attempts:
        raise CommandError(f"{run_dir / 'logs'} holds no logs yet")
    chosen = max(attempts) if attempt is None else attempt
    if chosen not in attempts:
        raise CommandError(f"--attempt got {chosen}; allowed: {', '.join(map(str, sorted(attempts)))}")
    files = sorted(file for file in attempts[chosen].rglob("*") if file.is_file())
    kinds = sorted({_kind(file) for file in files})
    if stage is not None and stage not in kinds:
        raise CommandError(f"--stage got {stage!r}; logs there are of {', '.join(kinds) or 'nothing yet'}")
    return [file for file in files if stage is None or _kind(file) == stage]


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of a log, read from its end: logs may be large."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _TAIL_BYTES))
        return list(deque(stream.read().decode(errors="replace").splitlines(), maxlen=max(0, count)))


def follow(files: Callable[[], list[Path]], wait: Callable[[float], object] = time.sleep) -> Iterator[tuple[Path, str]]:
    """Lines written from now on, for ever; a file that appears later is read from its beginning.

    The run may start again meanwhile: then the new attempt's files come too, and the old ones until they are silent.
    """
    places = {file: file.stat().st_size for file in files()}
    torn: dict[Path, bytes] = {}
    silent: dict[Path, int] = dict.fromkeys(places, 0)
    while True:
        with contextlib.suppress(CommandError):  # an attempt whose logs of this stage are still to come
            silent |= dict.fromkeys(files(), 0)
        for file in list(silent):
            try:
                with file.open("rb") as stream:
                    stream.seek(places.get(file, 0))
                    fresh = stream.read()
            except FileNotFoundError:
                fresh = b""
            silent[file] = 0 if fresh else silent[file] + 1
            if silent[file] > _SILENT_POLLS:
                del silent[file]
            places[file] = places.get(file, 0) + len(fresh)
            *lines, torn[file] = (torn.get(file, b"") + fresh).split(b"\n")
            for line in lines:
                yield file, line.decode(errors="replace")
        wait(_POLL_S)


def _kind(file: Path) -> str:
    """router, replica, init ...: what a log's name begins with."""
    match = re.match(r"[a-z]+", file.name)
    return match[0] if match else file.name
