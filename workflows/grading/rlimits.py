"""Limits of a process that is about to be executed; sent into sandboxes with what needs it."""

from __future__ import annotations

import resource


def limit(limits: dict[str, int]) -> None:
    """In the new process: set each `RLIMIT_name`, soft and hard, as far as the hard one that is there allows."""
    for name, most in limits.items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
