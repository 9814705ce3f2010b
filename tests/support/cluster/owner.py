"""Whose a test cluster is: root's, with daemons and jobs of several users, or one ordinary user's with all as that one.

Slurm does without root where SlurmUser, SlurmdUser, munged and every job are the same user: what the cluster cannot
show then is what takes two users, and what only root may do.
"""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

AS_ROOT = os.getuid() == 0
ME = pwd.getpwuid(os.getuid()).pw_name
SERVICE = "slurm" if AS_ROOT else ME
"""Who the controllers and the databases run as."""


def account_of(user: str) -> str:
    """The user of this machine that a test's user is."""
    return user if AS_ROOT else ME


def give(path: Path, user: str) -> None:
    """Make the path a user's own; one ordinary user owns all of it already."""
    if AS_ROOT:
        shutil.chown(path, user)
