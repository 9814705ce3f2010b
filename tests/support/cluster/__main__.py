"""`python -P -m tests.support.cluster up|down`: a test cluster for people to try things in."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.errors import ClusterError
from tests.support.cluster.roots import PARENT
from tests.support.cluster.spec import ClusterSpec


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -P -m tests.support.cluster", description=__doc__)
    parser.add_argument("action", choices=["up", "down"])
    parser.add_argument("--root", type=Path, default=PARENT / "hand", help="its directory (default: %(default)s)")
    for field in dataclasses.fields(ClusterSpec):
        option = "--" + field.name.replace("_", "-")
        if field.name == "accounting":
            parser.add_argument(
                "--no-accounting", dest="accounting", action="store_false", help="no database, no sacct"
            )
        elif isinstance(field.default, int | str):
            parser.add_argument(option, type=type(field.default), default=field.default, help="default: %(default)s")
    given = vars(parser.parse_args(arguments))
    action, root = given.pop("action"), given.pop("root")
    try:
        cluster = Cluster(ClusterSpec(**given), root=root, keep=True)
        if action == "down":
            cluster.down()
            return 0
        with cluster:
            print(f"up; to use it:\n  export SLURM_CONF={cluster.places.conf} PATH={cluster.binaries.path}:$PATH")
            print(f"  cd {cluster.share('alice')} && su alice -s /bin/bash")
            print(f"  {cluster.python.with_name('rollmill')} --help")
            print(f"to end it:\n  python -P -m tests.support.cluster down --root {root}")
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
