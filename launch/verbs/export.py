"""`rollmill export`: a run's committed rows in a format that other programs read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launch.errors import CommandError, Exit
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser


def run(name: str, args: Sequence[str]) -> int:
    """Write the export and say what it holds."""
    parser = verb_parser(name)
    parser.add_argument(
        "--format", required=True, metavar="F", help="jsonl, parquet, nemo-gym, verl, slime, prime-rl, skyrl or trl"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="PATH", type=Path, help="file to write, replaced whole"
    )
    parser.add_argument("--tag", help="only the rows of this tag")
    chosen = parser.parse_args(args)
    from workflows.errors import ExportError
    from workflows.export.export import check_format, export

    try:
        check_format(chosen.format)
        counted = export(find_run_dir(chosen.run_dir), chosen.format, chosen.output, tag=chosen.tag)
    except ExportError as error:
        raise CommandError(str(error)) from error
    left_out = f", {counted.without_row} ended without a row" if counted.without_row else ""
    left_out += f", {counted.masked} masked ones left out" if counted.masked else ""
    sys.stdout.write(
        f"{chosen.output}: {counted.rollouts} rollouts, {counted.chains} chains, {counted.bytes} bytes{left_out}\n"
    )
    return Exit.DONE
