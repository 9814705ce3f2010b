"""How verbs read their arguments: argparse, with its complaints as one line of ours."""

from __future__ import annotations

import argparse
from typing import NoReturn

from launch.commands import VERBS
from launch.errors import CommandError


class VerbParser(argparse.ArgumentParser):
    """A parser for one verb; a wrong argument raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        """Raise CommandError with the parser's own words."""
        raise CommandError(f"{message}; see {self.prog} --help")


def verb_parser(name: str) -> VerbParser:
    """A parser with what every verb takes: the run directory.

    `rollmill VERB --help` leaves by SystemExit(0), as argparse does.
    """
    sentence = next(verb.sentence for verb in VERBS if verb.name == name)
    parser = VerbParser(prog=f"rollmill {name}", description=sentence, allow_abbrev=False)
    parser.add_argument(
        "run_dir", nargs="?", metavar="RUN_DIR", help="run directory; default: the newest one under runs/"
    )
    return parser
