"""`python -P -m launch`: the same command line as `rollmill`."""

from __future__ import annotations

import sys

from launch.cli import main

sys.exit(main())
