"""Stands for a process of a run: `python -m tests.unit.launch.slurm.body KIND RUN_DIR NUMBER MEMBER`."""

import os
import signal
import sys
from pathlib import Path

kind, run_dir, number, member = sys.argv[1:]
(Path(run_dir) / f"alive-{kind}-{number}").write_text(str(os.getpid()))
if (Path(run_dir) / f"dies-{kind}-{number}").exists():
    sys.stderr.write(f"rollmill: {kind}-{number}: no memory for the model\n")
    sys.exit(1)
signal.sigwait({signal.SIGINT, signal.SIGTERM})
